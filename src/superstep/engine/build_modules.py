"""The modules of a rank: plain model code with this rank's parameters, changed from outside according to the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import superstep.engine.attention.document_attention
import superstep.engine.parallel.ring  # noqa: F401
from superstep.comm.mesh import Group
from superstep.engine.attention.choose_attention import SequenceView
from superstep.engine.layer_table import LayerContext, install_layers
from superstep.engine.layers.implementation import Choice
from superstep.engine.parallel.sequence_parallel import part
from superstep.engine.parallel.tensor import own_part
from superstep.engine.parallel.whole_rows import find_entries
from superstep.kernels.cross_entropy import apply_temperature
from superstep.model.by_place.batch_norm import freeze_statistics
from superstep.model.by_place.dropout import run_with_noise
from superstep.model.decoder import Head
from superstep.model.meta import on_meta
from superstep.model.mixture.expert_dispatch import ExpertDispatch
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import IGNORE, cross_entropy_sum, cut_cross_entropy_sum, linear_cross_entropy_sum
from superstep.numerics.noise import CurrentNoise, FindHeld
from superstep.numerics.objective import LossTarget, objective_sum
from superstep.numerics.soft_cap import soft_cap

Compute = Callable[[Sequence[Tensor], SequenceView], Tensor]
Loss = Callable[[Tensor, LossTarget, float], Tensor]
UnitLoss = Callable[[Tensor, Tensor], Tensor]
BuiltModule = tuple[nn.Module, tuple[Choice, ...]]
"""A unit's module, and the implementations of its layers."""


def build_module(spec: UnitSpec, params: Mapping[str, nn.Parameter], context: LayerContext) -> BuiltModule:
    """The unit's module with the given parameters, and the implementations of its layers."""
    with on_meta():
        module = spec.build()
    for local in spec.params:
        path, _, leaf = local.rpartition(".")
        setattr(module.get_submodule(path), leaf, params[local])
    freeze_statistics(module, [local for local, param in spec.params.items() if param.is_frozen])
    chosen = install_layers(module, spec, context)
    if context.is_compiled:
        module.compile(dynamic=False)
    return module, chosen


def make_compute(
    module: nn.Module,
    specs: Sequence[UnitSpec],
    unit: int,
    exchange: ExpertDispatch,
    noise: CurrentNoise,
    held: FindHeld,
    cp: Group | None,
) -> Compute:
    """A call of the module with the keyword arguments that it accepts.

    Args:
        module: the unit's.
        specs: of the model.
        unit: its number.
        exchange: of mixtures of experts.
        noise: of the unit's dropout modules.
        held: the elements of random tensors that this rank holds.
        cp: the ranks that share a sequence; None where it is whole.
    """
    spec, entries = specs[unit], find_entries(specs, unit, cp)

    def compute(inputs: Sequence[Tensor], sight: SequenceView) -> Tensor:
        given = {
            "attend": sight.attend,
            "positions": sight.positions,
            "scan": sight.scan,
            "exchange": exchange,
            "noise": None,
            "numbers": sight.numbers,
        }
        here = {name: given[name] for name in spec.takes}
        taken = [enter(x) for enter, x in zip(entries, inputs, strict=True)] if entries else inputs
        return run_with_noise(module, noise, taken, here, sight.place, f"{spec.name}.", held)

    return compute


def fill_buffers(module: nn.Module, spec: UnitSpec, device: torch.device, compute: torch.dtype) -> None:
    """Fill the module's buffers, such as a mask, from a copy that is built with memory."""
    if next(module.buffers(), None) is None:
        return
    # A copy of a tensor that has values cannot be made of fake memory.
    with unset_fake_temporarily(), torch.device(device):
        made = spec.build()
    for local, buffer in made.named_buffers():
        path, _, leaf = local.rpartition(".")
        setattr(module.get_submodule(path), leaf, buffer.to(device, compute if buffer.is_floating_point() else None))


_ATEN = torch.ops.aten
_SAVED = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        torch.ops.mkldnn._linear_pointwise.default,
        torch.ops.superstep.product_by_fp32.default,
        _ATEN._grouped_mm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        torch.ops.superstep.document_attention.default,
        torch.ops.superstep.blockwise_attention.default,
        torch.ops.superstep.delta_rule.default,
        torch.ops.superstep.delta_rule_over_ranks.default,
        torch.ops.superstep.ring_attention.default,
    }
)


def _policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selective(module: Compute, *, is_exact: bool = False, caches: list[Any] | None = None) -> Compute:
    """The module with selective recompute: it keeps the results of products and attention; norms, rotary embedding and
    gates are computed again, which costs memory traffic and no product (after Korthikanti 2022, sec. 5).

    Exact mode sums products in place, and kept tensors may not change; there everything is computed again. Each call
    adds the cache of its results to ``caches``.
    """

    def make_contexts() -> tuple[Any, Any]:
        caching, cached = create_selective_checkpoint_contexts(_policy)
        if caches is not None:
            caches.append(caching.storage)
        return caching, cached

    def compute(inputs: Sequence[Tensor], sight: SequenceView) -> Tensor:
        contexts = noop_context_fn if is_exact else make_contexts
        out: Tensor = checkpoint(
            module, inputs, sight, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
        )
        return out

    return compute


def build_loss(
    head: nn.Module,
    tp: Group | None,
    *,
    is_straight: bool,
    vocab: int,
    is_fused: bool = False,
    given: UnitLoss | None = None,
) -> Loss:
    """The loss of the last unit's output: (output, aim, scale) to the sum over all tokens.

    Its gradient is that of scale · sum. A decoder's whole head is fused with the loss, so that the whole logits never
    exist; ``is_straight`` lets it add the weight's gradient to the buffer in the forward, which the program allows
    where the buffer exists for the whole step (ZeRO 0 and 1).

    Args:
        head: the last unit's module.
        tp: the group over which its output is cut; None where it is whole.
        is_straight: see above.
        vocab: columns of the whole output, without padding.
        is_fused: whether ``kernels.cross_entropy`` computes it.
        given: a loss of the unit's own, of its whole output.
    """
    if given is not None:
        return partial(_user_loss, given)
    if not isinstance(head, Head):

        def plain(logits: Tensor, aim: LossTarget, scale: float) -> Tensor:
            logits = apply_temperature(logits, aim.temperature)
            if tp is None:
                if aim.classify is not None:
                    aim.classify(logits, aim.targets)
                return _scale_loss(_whole_loss(logits, aim), scale)
            columns = own_part(logits.shape[-1], vocab, tp)
            return _scale_loss(cut_cross_entropy_sum(logits, aim.targets, columns, aim.token_terms), scale)

        return plain
    linear = head.lm_head
    columns = None if tp is None else own_part(len(linear.weight), vocab, tp)

    def compute_fused(h: Tensor, aim: LossTarget, scale: float) -> Tensor:
        # In both cases the scale is applied before gradients are rounded to bf16, so that ZeRO stages give the same
        # bits.
        if aim.classify is not None:
            aim.classify(_compute_logits(head, h), aim.targets)
        into = linear.weight.grad if is_straight and torch.is_grad_enabled() else None
        return linear_cross_entropy_sum(
            h,
            linear.weight,
            aim.targets,
            scale=scale,
            weight_grad_into=into,
            terms=aim.token_terms,
            is_compiled=is_fused,
            columns=columns,
            temperature=aim.temperature,
            logit_cap=head.logit_cap,
        )

    return compute_fused


def _compute_logits(head: Head, h: Tensor) -> Tensor:
    """The logits of a head that leaves its product to the loss."""
    logits = F.linear(h, head.lm_head.weight)
    return logits if head.logit_cap is None else soft_cap(logits, head.logit_cap)


def _whole_loss(logits: Tensor, aim: LossTarget) -> Tensor:
    """The loss of whole rows of logits."""
    if aim.is_plain:
        return cross_entropy_sum(logits, aim.targets)
    logits_TV, targets_T = logits.flatten(0, -2).float(), aim.targets.flatten()
    return objective_sum(-F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="none"), aim)


def _user_loss(of: UnitLoss, out: Tensor, aim: LossTarget, scale: float) -> Tensor:
    if aim.classify is not None:
        aim.classify(out, aim.targets)
    return _scale_loss(of(out, aim.targets).float(), scale)


def on_part(loss: Loss, tp: Group) -> Loss:
    """The loss of this rank's part of the sequence, where the stream is split and the head is whole."""

    def compute(out: Tensor, aim: LossTarget, scale: float) -> Tensor:
        return loss(out, aim.cut(lambda whole: part(whole, tp)), scale)

    return compute


class _Scale(torch.autograd.Function):
    """The identity with a scaled gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None  # type: ignore[attr-defined]


def _scale_loss(loss: Tensor, scale: float) -> Tensor:
    out: Tensor = _Scale.apply(loss, scale)  # type: ignore[no-untyped-call]
    return out
