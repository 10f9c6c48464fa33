"""Merge an adapter into its base weights: a folder in Hugging Face's format, without an adapter.

    W' = W + scale · B A        computed in fp32, rounded once to the stored dtype of W

Files keep their names and their tensors, and are read and written one at a time. The base is only read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from superstep.errors import ConfigError, StateError
from superstep.model.files.hf import FILE, INDEX, open_weights
from superstep.model.files.peft_adapter import Adapter, linears_of, read_adapter
from superstep.model.files.peft_config import CONFIG
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.serve.files.weights import version_of
from superstep.train.weights.base_file import BASE, BaseWeights, read_base
from superstep.train.weights.lora_base import require_same

BESIDE = (".json", ".txt", ".model", ".jinja")
"""Endings of files that make a folder of weights a model: its shape, its tokenizer, its template."""
NOT_BESIDE = ("manifest.json", "corpus.json", BASE, CONFIG, INDEX)
OF_THE_ADAPTER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that training may have changed: the adapter's folder takes precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        base: the base weights.
        linears: number of changed linears.
    """

    base: Path
    linears: int


def merge(adapter: Path, out: Path, base: Path | None = None) -> MergeResult:
    """Write the merged model.

    Args:
        adapter: a checkpoint with an adapter, or a PEFT folder.
        out: the folder to make.
        base: a folder of the weights; None uses the adapter's own base.

    Raises:
        ConfigError: ``out`` exists, or the adapter has linears that the base does not have.
        StateError: a folder is invalid, or the base is not the one of the training.
    """
    if out.exists():
        raise ConfigError(f"--out = '{out}' is there already; name a folder that is not.")
    base = _base_of(adapter, base)
    config = base / "config.json"
    if not config.is_file():
        raise StateError(f"'{base}' has no config.json; name the folder of a model with --base.")
    adapted = read_adapter(adapter, linears_of(shape_of(ModelConfig(name=str(config)))))
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name in _files(base):
            _write(base / name, unfinished / name, adapted)
        for file in _beside(base, adapter):
            shutil.copyfile(file, unfinished / file.name)
        unfinished.rename(out)
    except OSError as error:
        raise StateError(f"'{out}' cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return MergeResult(base=base, linears=len(adapted.parts))


def _base_of(adapter: Path, named: Path | None) -> Path:
    if (adapter / BASE).is_file():
        base = read_base(adapter)
        folder = named or base.folder
        if folder is None:
            raise StateError(f"'{adapter}' adds to weights that were drawn from {base.version}, and lie in no folder.")
        require_same(base, BaseWeights(folder, version_of(open_weights(folder))), adapter)
        return folder
    if named is not None:
        return named
    try:
        base_name = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise StateError(f"'{adapter}' holds no adapter ({error!r}); name a run that trained one.") from error
    if not base_name or not Path(base_name).is_dir():
        raise StateError(f"'{adapter}' adds to {base_name!r}, which is no folder here; name its folder with --base.")
    return Path(base_name)


def _files(base: Path) -> list[str]:
    """The safetensors files of a folder, by name."""
    index = base / INDEX
    if not index.is_file():
        return [FILE]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _write(source: Path, target: Path, adapter: Adapter) -> None:
    with safe_open(source, framework="pt", device="cpu") as file:
        tensors = {name: _merge(name, file.get_tensor(name), adapter) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, target, file.metadata() or {"format": "pt"})


@torch.no_grad()
def _merge(name: str, weight: Tensor, adapter: Adapter) -> Tensor:
    part = adapter.parts.get(name.removesuffix(".weight"))
    if part is None or not name.endswith(".weight"):
        return weight
    added = part.b.float() @ part.a.float()
    return added.mul_(adapter.scale(name.removesuffix(".weight"))).add_(weight).to(weight.dtype)


def _beside(base: Path, adapter: Path) -> Iterator[Path]:
    for file in sorted(base.iterdir()):
        if file.is_file() and file.suffix in BESIDE and file.name not in NOT_BESIDE:
            yield file
    if (base / INDEX).is_file():
        yield base / INDEX
    for name in OF_THE_ADAPTER:
        if (adapter / name).is_file():
            yield adapter / name
