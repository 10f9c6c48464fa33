"""Which layers are torch's own with nothing changed, so that their products and lookups can be done in another way."""

from __future__ import annotations

from torch import nn


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer gives ``x · weightᵀ + bias`` and nothing else."""
    return type(layer) is nn.Linear and _is_untouched(layer)


def is_plain_embedding(layer: nn.Module) -> bool:
    """Whether a layer gives rows of its table, and each row's gradient is the sum over those who looked it up."""
    return (
        type(layer) is nn.Embedding
        and _is_untouched(layer)
        and layer.padding_idx is None
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
    )


def _is_untouched(layer: nn.Module) -> bool:
    """No forward of the instance's own, no hooks, and a weight that is a parameter and not made from others."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" not in vars(layer) and not any(hooks) and layer._parameters.get("weight") is not None
