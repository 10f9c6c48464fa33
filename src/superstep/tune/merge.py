"""Merge an adapter into its base weights: a folder in Hugging Face's format, without an adapter.

    W' = W + scale · B A        computed in fp32, rounded once to the stored dtype of W

Of an adapter that was trained beside weights in few bits, W is the folder's (``original``), which is more precise than
what the factors were fitted to. Or it is what training had (``quantized``): then the merged model computes what
training did, but for one rounding.

Files keep their names and their tensors, and are read and written one at a time. The base is only read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from superstep.errors import ConfigError, StateError
from superstep.kernels.packed.pack import pack, unpack_by_torch, whole_place
from superstep.model.files.hf import FILE, INDEX, open_weights
from superstep.model.files.peft_adapter import Adapter, linears_of, read_adapter
from superstep.model.files.peft_config import CONFIG
from superstep.plan.block_weights import BlockFormat
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
        block_format: of the base in training; None for the compute dtype.
        difference: the root mean square of what it changes in a weight, over that of the weights.
    """

    base: Path
    linears: int
    block_format: BlockFormat | None
    difference: float


Onto: TypeAlias = Literal["original", "quantized"]


@dataclass(slots=True)
class _Base:
    """The base as training had it, and how far it is from the folder's.

    Attributes:
        linears: that were in blocks.
        block_format: of them; None for none.
        is_kept: whether the adapter is merged onto it.
    """

    linears: Collection[str]
    block_format: BlockFormat | None
    is_kept: bool
    squares: float = 0.0
    changed: float = 0.0

    def take(self, linear: str, weight: Tensor) -> Tensor:
        """The weight of a linear to merge onto."""
        if self.block_format is None:
            return weight
        place = whole_place(*weight.shape)
        packed = unpack_by_torch(*pack(weight, self.block_format), place, self.block_format, torch.float32)
        self.squares += float(weight.float().square().sum())
        self.changed += float((packed - weight.float()).square().sum())
        return packed if self.is_kept else weight

    def find_difference(self) -> float:
        """The root mean square of the change, over that of the weights."""
        return math.sqrt(self.changed / self.squares) if self.squares else 0.0


def merge(adapter: Path, out: Path, base: Path | None = None, *, onto: Onto = "original") -> MergeResult:
    """Write the merged model.

    Args:
        adapter: a checkpoint with an adapter, or a PEFT folder.
        out: the folder to make.
        base: a folder of the weights; None uses the adapter's own base.
        onto: the folder's weights, or those that training had.

    Raises:
        ConfigError: ``out`` exists, the adapter has linears that the base does not have, or training had the folder's
            weights where those in few bits are asked for.
        StateError: a folder is invalid, or the base is not the one of the training.
    """
    if out.exists():
        raise ConfigError(f"--out = '{out}' is there already; name a folder that is not.")
    base = _base_of(adapter, base)
    config = base / "config.json"
    if not config.is_file():
        raise StateError(f"'{base}' has no config.json; name the folder of a model with --base.")
    block_format = read_base(adapter).block_format if (adapter / BASE).is_file() else None
    if onto == "quantized" and block_format is None:
        raise ConfigError(
            f"--onto = 'quantized': '{adapter}' was trained beside weights as they lie in the folder; leave --onto out."
        )
    linears = linears_of(shape_of(ModelConfig(name=str(config))))
    adapted, beside = read_adapter(adapter, linears), _Base(linears, block_format, is_kept=onto == "quantized")
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name in _files(base):
            _write(base / name, unfinished / name, adapted, beside)
        for file in _beside(base, adapter):
            shutil.copyfile(file, unfinished / file.name)
        unfinished.rename(out)
    except OSError as error:
        raise StateError(f"'{out}' cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return MergeResult(
        base=base, linears=len(adapted.parts), block_format=block_format, difference=beside.find_difference()
    )


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


def _write(source: Path, target: Path, adapter: Adapter, base: _Base) -> None:
    with safe_open(source, framework="pt", device="cpu") as file:
        tensors = {name: _merge(name, file.get_tensor(name), adapter, base) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, target, file.metadata() or {"format": "pt"})


@torch.no_grad()
def _merge(name: str, weight: Tensor, adapter: Adapter, base: _Base) -> Tensor:
    linear = name.removesuffix(".weight")
    if linear == name or linear not in base.linears:
        return weight
    onto, part = base.take(linear, weight), adapter.parts.get(linear)
    if part is None:
        return onto.to(weight.dtype)
    added = part.b.float() @ part.a.float()
    return added.mul_(adapter.scale(linear)).add_(onto).to(weight.dtype)


def _beside(base: Path, adapter: Path) -> Iterator[Path]:
    for file in sorted(base.iterdir()):
        if file.is_file() and file.suffix in BESIDE and file.name not in NOT_BESIDE:
            yield file
    if (base / INDEX).is_file():
        yield base / INDEX
    for name in OF_THE_ADAPTER:
        if (adapter / name).is_file():
            yield adapter / name
