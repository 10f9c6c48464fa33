"""Detects unchanged layers of torch, so that their products and lookups can be replaced."""

from __future__ import annotations

from torch import nn


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer computes ``x · weightᵀ + bias`` and nothing else."""
    return type(layer) is nn.Linear and _is_untouched(layer)


def is_plain_embedding(layer: nn.Module) -> bool:
    """Whether a layer only looks up rows of its table, and each row's gradient is the plain sum over its lookups."""
    return _is_plain_lookup(layer) and not layer.sparse


def is_plain_sparse_embedding(layer: nn.Module) -> bool:
    """The same of a table with a sparse gradient."""
    return _is_plain_lookup(layer) and bool(layer.sparse)


def _is_plain_lookup(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Embedding
        and _is_untouched(layer)
        and layer.padding_idx is None
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
    )


def is_plain_convolution(layer: nn.Module) -> bool:
    """Whether a layer convolves with its weight, zeros around the input, and adds its bias, and nothing else."""
    return type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and _is_untouched(layer) and layer.padding_mode == "zeros"


def is_sparse_table(module: nn.Module, local: str) -> bool:
    """Whether a parameter of a module is the table of an embedding with ``sparse=True``."""
    path, _, leaf = local.rpartition(".")
    layer = module.get_submodule(path)
    return leaf == "weight" and isinstance(layer, nn.Embedding) and layer.sparse


def _is_untouched(layer: nn.Module) -> bool:
    """No forward of the instance's own, no hooks, and a weight that is a plain parameter."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" not in vars(layer) and not any(hooks) and layer._parameters.get("weight") is not None
