"""A small model with adapters of random factors, and the same with an adapter merged into its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.files.peft_adapter import Adapter, LoraFactors, linears_of
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

VOCAB = 64


def shape(*, qkv_bias=False, **model):
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": VOCAB}
    return replace(shape_of(ModelConfig(name="tiny", **sizes | model)), qkv_bias=qkv_bias)


def tensors_of(model_shape):
    """Random weights, larger than in training, so that one token is much likelier than another."""
    decoder = Decoder(model_shape)
    with torch.no_grad():
        for spec, param in parameters(decoder, units(model_shape)).values():
            param.copy_(initial(spec, param.shape, 0) * (8 if param.dim() > 1 else 1))
            if spec.name.endswith(".bias"):
                param.copy_(torch.linspace(-0.5, 0.5, param.numel()))
    return global_tensors(decoder, units(model_shape))


def write_model(folder: Path, adapter: Adapter | None = None, **model) -> Path:
    """The model's folder; with an adapter, its weights are those of both together."""
    found = shape(**model)
    tensors = tensors_of(found)
    for name, part in adapter.parts.items() if adapter else ():
        weight = f"{name}.weight"
        tensors[weight] = tensors[weight] + adapter.scale(name) * part.b @ part.a
    save_weights(folder, tensors, found)
    return folder


def random_adapter(seed: int, *, rank: int = 4, alpha: float = 6.0, only: str = "", stabilized=False, linears=None):
    """Factors that change what the model says a good deal."""
    generator = torch.Generator().manual_seed(seed)
    parts = {
        name: LoraFactors(
            torch.randn(rank, inputs, generator=generator) * 0.15,
            torch.randn(outputs, rank, generator=generator) * 0.15,
            alpha,
        )
        for name, (outputs, inputs) in (linears or linears_of(shape())).items()
        if only in name
    }
    return Adapter(parts=parts, is_stabilized=stabilized)
