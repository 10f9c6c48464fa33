"""Modules that cannot be trained in parallel, because their results depend on the layout: refused by name.

Layers are recognised by their class and options; random operations in a forward are detected when it runs, by torch's
tags. Only random numbers by place are the same on every layout (``numerics.noise``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.errors import ConfigError
from superstep.model.by_place.dropout import is_dropout

SHARES = ("p", "dropout_p", "dropout")
"""Names of the dropped share in operations' arguments."""


def check_modules(module: nn.Module, at: str) -> None:
    """Check that no part of a unit's module depends on the layout.

    Args:
        module: the unit's.
        at: the unit's name in errors.

    Raises:
        ConfigError: names the part, and what would work.
    """
    for path, part in module.named_modules():
        here = f"{at}, '{path}'" if path else at
        for refusal in (_statistics(part), _randomness(part), _weight_from_others(part), _hidden(part)):
            if refusal:
                raise ConfigError(f"{here} {refusal}")


def check_hooks(module: nn.Module, at: str) -> None:
    """Check that no parameter has a hook: the engine replaces parameters by its own tensors.

    Raises:
        ConfigError: names the first one.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{at}, '{name}' has a hook, which would be lost: the engine keeps parameters in buffers of its own; "
                "do in the forward what the hook does."
            )


def _statistics(part: nn.Module) -> str:
    if isinstance(part, _BatchNorm):
        return (
            f"is a {type(part).__name__}: its statistics couple the samples of a microbatch and are kept "
            "apart from training, so the result would depend on the layout; use "
            "superstep.model.by_place.batch_norm.BatchNorm, which has groups of samples, or torch.nn.GroupNorm."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq:
        return (
            "divides gradients by how often a token comes in a microbatch (scale_grad_by_freq), so the result would "
            "depend on the layout; leave scale_grad_by_freq out."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        return (
            f"changes its table as it looks tokens up (max_norm = {part.max_norm:g}), which ranks would do each for "
            "themselves; leave max_norm out, or scale what it gives."
        )
    return ""


def _randomness(part: nn.Module) -> str:
    share, mend = 0.0, ""
    if isinstance(part, _DropoutNd):
        if is_dropout(part):
            return "drops in place; leave inplace out." if part.inplace and part.p > 0 else ""
        share, name, mend = part.p, "p", "use torch.nn.Dropout, or "
    elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        share, name = part.dropout, "dropout"
    if share > 0:
        return (
            f"drops at random ({name} = {share:g}), so that no two layouts would compute the same; {mend}set its "
            f"{name} to 0."
        )
    return ""


def _weight_from_others(part: nn.Module) -> str:
    if isinstance(part, _SpectralNorm):
        return (
            "is spectral norm: it goes on with its estimate in every forward pass, as often as a layout has "
            "microbatches; use torch.nn.utils.parametrizations.weight_norm, or none."
        )
    from_hook = [name for name in _loose(part) if f"{name}_g" in part._parameters or f"{name}_orig" in part._parameters]
    if from_hook:
        return (
            f"has its '{from_hook[0]}' made by a hook (torch.nn.utils.weight_norm, spectral_norm or prune of old), "
            "which moves to no device; use torch.nn.utils.parametrizations.weight_norm."
        )
    return ""


def _hidden(part: nn.Module) -> str:
    loose = _loose(part)
    if loose:
        return (
            f"holds the tensor '{loose[0]}' as an attribute, which moves to no device; "
            f"register_buffer('{loose[0]}', ...) instead."
        )
    return ""


def _loose(part: nn.Module) -> list[str]:
    return [name for name, value in vars(part).items() if isinstance(value, Tensor)]


class RandomOperations(TorchDispatchMode):
    """Records random operations.

    Attributes:
        names: of these operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ANN401
    """Whether an operation with optional dropout, such as fused attention, has it turned off."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in SHARES:
            value = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value == 0)
    return False


def depends_on(out: Tensor, x: Tensor) -> bool:
    """Whether a gradient of ``out`` reaches ``x``, a leaf or a computed tensor."""
    start, end = out.grad_fn, x.grad_fn
    waiting: list[Node] = [start] if start is not None else []
    visited: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is end:
            return True
        visited.add(node)
        waiting += [up for up, _ in node.next_functions if up is not None and up not in visited]
    return out is x
