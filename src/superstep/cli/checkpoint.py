"""superstep checkpoint: a run's checkpoints, their verification, and export of their weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from superstep.cli.arguments.checkpoint import CheckpointArgs, CopyOptions, read
from superstep.errors import DamagedCheckpoint, StateError
from superstep.observe.number_format import bytes_text
from superstep.state.checkpoint_dirs import checkpoints, leftovers
from superstep.state.export import export
from superstep.state.manifest import MANIFEST, Manifest
from superstep.state.object_store.store import CheckpointStore, is_url
from superstep.state.verify import glance, newest, verify
from superstep.train.run_folder.run_paths import RunFolder


def main(argv: Sequence[str]) -> int:
    """Run the action of the first word.

    Returns:
        The exit status: 1 for a damaged checkpoint.
    """
    arguments = read(argv)
    if is_url(arguments.name):
        return _in_store(arguments)
    match arguments.word:
        case "list":
            _report(arguments.path, glance)
            return 0
        case "verify":
            return 0 if _report(arguments.path, verify) else 1
        case "export":
            return _export(arguments.path, arguments.options)


def _report(path: Path, look: Callable[[Path], Manifest]) -> bool:
    """Print ``look``'s result for each checkpoint; whether all are complete."""
    root, folders = _find_checkpoints(path)
    are_whole = True
    for folder in folders:
        try:
            manifest = look(folder)
        except StateError as error:
            print(f"{folder.name}  {getattr(error, 'why', error)}", flush=True)
            are_whole = False
            continue
        _say_whole(folder.name, manifest, is_read=look is verify)
    for folder in leftovers(root) if root is not None else ():
        print(f"{folder.name}  no checkpoint: {_why_left(folder)}", flush=True)
    return are_whole


def _say_whole(name: str, manifest: Manifest, *, is_read: bool) -> None:
    size = sum(file.bytes for file in manifest.files.values())
    at = manifest.position
    state = "whole" if is_read else "complete at a quick look"
    files = f"{len(manifest.tensors)} tensors, {bytes_text(size)}"
    print(f"{name}  {state}  step {at.step}, {at.tokens} tokens seen; {files}", flush=True)


def _in_store(arguments: CheckpointArgs) -> int:
    """The same for a store."""
    store = CheckpointStore(arguments.name)
    steps = store.steps()
    if not steps:
        raise StateError(f"'{arguments.name}' has no checkpoint; name the state.store of a run that has saved one.")
    if arguments.word == "export":
        with tempfile.TemporaryDirectory(prefix="superstep-export-") as folder:
            fetched = store.fetch(steps[-1], Path(folder))
            return _write_export(fetched, store.url_of(steps[-1]), arguments.options)
    are_whole = True
    for step in steps:
        try:
            manifest = store.verify(step) if arguments.word == "verify" else store.manifest(step)
        except DamagedCheckpoint as error:
            print(f"{store.url_of(step)}  {error.why}", flush=True)
            are_whole = False
        else:
            _say_whole(store.url_of(step), manifest, is_read=arguments.word == "verify")
    return 0 if are_whole or arguments.word == "list" else 1


def _why_left(folder: Path) -> str:
    ending = folder.suffix.partition("-")[0]
    known = {
        ".partial": "being written, or left by a crash; the next save removes it",
        ".damaged": "damaged, skipped when the run resumed; you may delete it",
        ".rolled-back": "rolled back by the run; you may delete it",
        ".aside": "was in the way of a checkpoint; you may delete it",
    }
    return known.get(ending, "being deleted; the next save removes it")


def _find_checkpoints(path: Path) -> tuple[Path | None, list[Path]]:
    """The folder of a run's checkpoints, and these; for a single checkpoint only that.

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
    folders = checkpoints(root)
    if not folders:
        raise StateError(f"'{path}' has no checkpoint yet; train it for at least state.save_every steps.")
    return root, folders


def _export(path: Path, options: CopyOptions) -> int:
    root, folders = _find_checkpoints(path)
    checkpoint = folders[-1] if root is None else newest(root)
    assert checkpoint is not None, "a run without any has been refused"
    return _write_export(checkpoint, str(checkpoint), options)


def _write_export(checkpoint: Path, name: str, options: CopyOptions) -> int:
    out = Path(options.out)
    done = export(checkpoint, out, dtype=options.dtype, shard_bytes=int(options.shard_gib * 2**30))
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"{out}: the weights of {name} in {options.dtype}, {bytes_text(done.bytes)} in {files}")
    if not done.has_config:
        print("The model is of your own file: other loaders can read the tensors but cannot build the model.")
    return 0
