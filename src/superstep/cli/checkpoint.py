"""superstep checkpoint: what a run has on disk, whether it is whole, and its weights for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from superstep.cli.arguments.checkpoint import Options, read
from superstep.cli.figures import bytes_text
from superstep.errors import StateError
from superstep.state.export import export
from superstep.state.folders import checkpoints, leftovers
from superstep.state.manifest import MANIFEST, Manifest
from superstep.state.verify import glance, newest, verify
from superstep.train.run_folder import RunFolder


def main(argv: Sequence[str]) -> int:
    """Do what the first word says.

    Returns:
        The exit status: 1 where a checkpoint was verified and is damaged.
    """
    asked = read(argv)
    match asked.word:
        case "list":
            _told(asked.path, glance)
            return 0
        case "verify":
            return 0 if _told(asked.path, verify) else 1
        case "export":
            return _exported(asked.path, asked.options)


def _told(path: Path, look: Callable[[Path], Manifest]) -> bool:
    """Say what ``look`` finds of each checkpoint; whether all are whole."""
    root, found = _found(path)
    are_whole = True
    for folder in found:
        try:
            manifest = look(folder)
        except StateError as error:
            print(f"{folder.name}  {getattr(error, 'why', error)}", flush=True)
            are_whole = False
            continue
        size = sum(file.bytes for file in manifest.files.values())
        at = manifest.position
        seen = "whole" if look is verify else "whole at a glance"
        files = f"{len(manifest.tensors)} tensors, {bytes_text(size)}"
        print(f"{folder.name}  {seen}  step {at.step}, {at.tokens} tokens seen; {files}", flush=True)
    for folder in leftovers(root) if root is not None else ():
        print(f"{folder.name}  no checkpoint: {_why_left(folder)}", flush=True)
    return are_whole


def _why_left(folder: Path) -> str:
    ending = folder.suffix.partition("-")[0]
    known = {
        ".partial": "being written, or left by a crash; the next save removes it",
        ".damaged": "passed over when the run went on; yours to delete",
        ".aside": "was in the way of a checkpoint; yours to delete",
    }
    return known.get(ending, "being deleted; the next save removes it")


def _found(path: Path) -> tuple[Path | None, list[Path]]:
    """The folder of a run's checkpoints, and these; of a single checkpoint that alone.

    Raises:
        StateError: it is neither, or the run has none.
    """
    if not path.is_dir():
        raise StateError(f"'{path}' is not there; name a run or a checkpoint.")
    if not RunFolder(root=path).config.is_file():
        if (path / MANIFEST).exists() or path.parent.name == RunFolder(root=Path()).checkpoints.name:
            return None, [path]
        raise StateError(f"'{path}' is neither a run nor a checkpoint: it has no run.toml and no {MANIFEST}.")
    root = RunFolder(root=path).checkpoints
    found = checkpoints(root)
    if not found:
        raise StateError(f"'{path}' has no checkpoint yet; train it for at least state.save_every steps.")
    return root, found


def _exported(path: Path, options: Options) -> int:
    root, found = _found(path)
    checkpoint = found[-1] if root is None else newest(root)
    assert checkpoint is not None, "a run without any has been refused"
    out = Path(options.out)
    done = export(checkpoint, out, dtype=options.dtype, shard_bytes=int(options.shard_gib * 2**30))
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"{out}: the weights of {checkpoint} in {options.dtype}, {bytes_text(done.bytes)} in {files}")
    if not done.has_config:
        print("The model is of your own file: other loaders read the tensors, and know nothing to build of them.")
    return 0
