"""Adapters: low-rank additions to a model's linears (LoRA, Hu 2021), read from and written to a peft folder.

folder/adapter_config.json          rank, alpha, and which linears
folder/adapter_model.safetensors    base_model.model.<linear>.lora_A.weight and ...lora_B.weight

y = base(x) + scale · B(A(x))       scale = alpha / R, or alpha / sqrt(R) where stabilized (Kalajdzievski 2023)

R  rank      I  inputs of the linear      O  its outputs
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from superstep.errors import ConfigError, StateError
from superstep.model.files.hf import require_regular
from superstep.model.files.peft_config import CONFIG, AdapterConfig, read_config
from superstep.plan.model.axes import outline_of
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolution.lora import ENDS, PREFIX

FILE = "adapter_model.safetensors"
A, B = ENDS["a"], ENDS["b"]


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The adapter of one linear.

    Attributes:
        a: the first factor, [R, I].
        b: the second, [O, R].
        alpha: the strength, before it is divided by the rank or its square root.
    """

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of a model.

    Attributes:
        parts: for each linear, by its global name without ``.weight``.
        is_stabilized: whether alpha is divided by the root of the rank (``use_rslora``).
        version: a digest of its files; empty if it was not read from files.
    """

    parts: Mapping[str, LoraFactors]
    is_stabilized: bool = False
    version: str = ""

    def scale(self, name: str) -> float:
        """The factor of the addition to a linear."""
        return scale_of(self.parts[name].alpha, self.parts[name].rank, is_stabilized=self.is_stabilized)


def scale_of(alpha: float, rank: int, *, is_stabilized: bool) -> float:
    """The factor of the product B(A(x))."""
    return alpha / (math.sqrt(rank) if is_stabilized else rank)


def linears_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears that an adapter may change, by global name: all linears of the blocks, except
    experts and routers, which process other tokens at every step.
    """
    parameters = (p for unit in outline_of(shape).units if unit.name.startswith("block.") for p in unit.parameters)
    return {
        p.name.removesuffix(".weight"): (p.dims[0], p.dims[1])
        for p in parameters
        if p.layer == "linear" and len(p.dims) == 2
    }


def read_adapter(folder: Path, linears: Mapping[str, tuple[int, int]]) -> Adapter:
    """The adapter in a folder.

    Args:
        folder: in peft's format.
        linears: outputs and inputs of the model's linears, by global name.

    Raises:
        ConfigError: its configuration is not supported, or its tensors do not match this model's linears.
        StateError: it cannot be read, or is damaged.
    """
    try:
        for file in (CONFIG, FILE):
            require_regular(folder / file)
        text, data = (folder / CONFIG).read_bytes(), (folder / FILE).read_bytes()
    except OSError as error:
        raise StateError(f"'{folder}' holds no adapter ({error}); it must have {CONFIG} and {FILE}.") from error
    config = read_config(text, folder / CONFIG)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StateError(f"{folder / FILE} is damaged: {error!r}; save it again.") from error
    factors = _factors(tensors, linears, folder / FILE)
    _check_targets(config, set(factors), linears, folder)
    parts = {name: _part(name, *pair, config, linears[name], folder) for name, pair in factors.items()}
    digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()[:16]
    return Adapter(parts=parts, is_stabilized=config.is_stabilized, version=digest)


def _factors(
    tensors: Mapping[str, Tensor], linears: Mapping[str, tuple[int, int]], file: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors of each linear."""
    if not tensors:
        raise StateError(f"{file} has no tensors; save the adapter again.")
    named: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        end = next((end for end in (A, B) if key.endswith(end)), None)
        name = key.removeprefix(PREFIX).removesuffix(end or "")
        if end is None or not key.startswith(PREFIX) or name not in linears:
            raise ConfigError(
                f"{file}: tensor '{key}' belongs to no linear that takes adapters; in this model these are "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in linears}))} of its {_layers(linears)} layers, "
                f"as in {PREFIX}{next(iter(linears))}{A}."
            )
        named.setdefault(name, {})[end] = tensor
    alone = next((name for name, pair in named.items() if len(pair) < 2), None)
    if alone is not None:
        missing = B if A in named[alone] else A
        raise StateError(f"{file}: '{PREFIX}{alone}{missing}' is missing; save the adapter again.")
    return {name: (pair[A], pair[B]) for name, pair in named.items()}


def _layers(linears: Mapping[str, tuple[int, int]]) -> int:
    return max(Counter(name.rpartition(".")[2] for name in linears).values())


def _check_targets(
    config: AdapterConfig, targets: set[str], linears: Mapping[str, tuple[int, int]], folder: Path
) -> None:
    named = {name for name in linears if config.targets(name)}
    if named - targets:
        raise StateError(
            f"{folder / FILE}: target_modules of {CONFIG} names {min(named - targets)}, but the file has no "
            "tensors of it; save the adapter again."
        )
    if targets - named:
        raise ConfigError(
            f"{folder / FILE}: it has tensors of {min(targets - named)}, which target_modules of {CONFIG} does not "
            "name; add it there."
        )


def _part(
    name: str, a_RI: Tensor, b_OR: Tensor, config: AdapterConfig, size: tuple[int, int], folder: Path
) -> LoraFactors:
    outputs, inputs = size
    rank = config.rank(name)
    for end, tensor, expected in ((A, a_RI, [rank, inputs]), (B, b_OR, [outputs, rank])):
        key = f"{folder / FILE}: '{PREFIX}{name}{end}'"
        if list(tensor.shape) != expected:
            raise ConfigError(
                f"{key} is {list(tensor.shape)}, and must be {expected}: rank {rank} as {CONFIG} says, and the sizes "
                "of the model that is served; use an adapter of this model."
            )
        if not tensor.is_floating_point():
            raise ConfigError(f"{key} is of {tensor.dtype}; it must be of floating-point numbers.")
        if not bool(torch.isfinite(tensor.float()).all()):
            raise StateError(f"{key} holds NaN or infinity; its training went wrong.")
    return LoraFactors(a_RI, b_OR, config.alpha(name))


def config_text(strengths: Mapping[str, tuple[int, float]], *, is_stabilized: bool, base: str | None) -> str:
    """An adapter's configuration in peft's format.

    Args:
        strengths: rank and alpha of each linear, by its full name.
        is_stabilized: whether alpha is divided by the root of the rank.
        base: the name or the folder of the base model.
    """
    rank, _ = Counter(rank for rank, _ in strengths.values()).most_common(1)[0]
    alpha, _ = Counter(alpha for _, alpha in strengths.values()).most_common(1)[0]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": is_stabilized,
        "target_modules": sorted(strengths),
        "rank_pattern": {name: other for name, (other, _) in strengths.items() if other != rank},
        "alpha_pattern": {name: other for name, (_, other) in strengths.items() if other != alpha},
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    return json.dumps(config, indent=2) + "\n"


def write_adapter(folder: Path, adapter: Adapter, *, base: str | None = None) -> None:
    """Write an adapter in peft's format, with full names of linears, so that each name matches one linear only.

    Two files cannot be replaced at once: if others may read the folder, give each version its own folder.

    Args:
        folder: created if missing.
        adapter: at least one linear.
        base: the name or the folder of the base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    strengths = {name: (part.rank, part.alpha) for name, part in adapter.parts.items()}
    config = config_text(strengths, is_stabilized=adapter.is_stabilized, base=base)
    tensors = {
        f"{PREFIX}{name}{end}": factor.detach().cpu().contiguous()
        for name, part in adapter.parts.items()
        for end, factor in ((A, part.a), (B, part.b))
    }
    # A reader sees complete files only.
    for name, data in (
        (CONFIG, config.encode()),
        (FILE, save(tensors, {"format": "pt"})),
    ):
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(data)
        unfinished.replace(folder / name)
