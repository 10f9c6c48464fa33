"""What every peer shares: the job, the result, and the training loop around a peer's own parts.

A peer is the same decoder trained with PyTorch's own parallelism. It serves two ends: the engine is tested
against code that is not ours, and it is benchmarked beside what a user would otherwise run.

    B  sequences of the global batch     S  positions     V  vocabulary
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.unit import initial
from superstep.numerics.loss import IGNORE
from superstep.plan.model.shape import ModelShape

Peer = Literal["one_process", "ddp", "fsdp2", "tensor_parallel", "pipelining", "zero2", "zero3", "accelerate"]
Dtype = Literal["fp32", "bf16"]
PipelineSchedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """One training run, told to every peer in the same words."""

    peer: Peer
    shape: ModelShape
    weights: Mapping[str, Tensor]
    """The first weights: a state dict of the whole Decoder, fp32. Never written to."""
    batches: Sequence[tuple[Tensor, Tensor]]
    """For each step the whole global batch, tokens and targets, both [B, S]; every rank gets all of it."""
    microbatch: int
    """Sequences that go through the model at once on one rank."""
    lr: float | tuple[float, ...] = 1e-3
    """The learning rate, or one for each step."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dtype: Dtype = "fp32"
    """bf16: products in bf16; master weights, gradients, loss and optimizer in fp32."""
    compile: bool = False
    """Compile each block and the loss: one_process, ddp and fsdp2 only."""
    reshard_after_forward: bool = True
    """fsdp2: drop a block's gathered weights after its forward (ZeRO-3); false keeps them for the step."""
    reduce_every_microbatch: bool = False
    """fsdp2: cut the gradients after each microbatch (less memory) instead of after the last (less traffic)."""
    sequence_parallel: bool = True
    """tensor_parallel: cut the residual stream over positions between the cut layers."""
    schedule: PipelineSchedule = "gpipe"
    """pipelining: the order of microbatches."""
    threads: int = 1
    """Threads of torch on each rank."""
    keep_weights: bool = False
    """Whether rank 0 returns the final weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """What one rank of a peer saw.

    Attributes:
        losses: for each step the loss of the whole global batch; the same on every rank.
        grad_norms: for each step the global gradient norm before clipping.
        step_seconds: for each step this rank's wall time.
        cpu_seconds: for each step the processor time of this rank's threads, those that communicate too:
            steadier than wall time on a machine that is shared.
        baseline_bytes: resident memory before the model was made.
        peak_rss_bytes: the most resident memory after that; what training took is the difference.
        weights: rank 0 with ``keep_weights``: the final state dict, whole, fp32.
    """

    losses: list[float]
    grad_norms: list[float]
    step_seconds: list[float]
    cpu_seconds: list[float]
    baseline_bytes: int
    peak_rss_bytes: int
    weights: dict[str, Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A peer's own parts, that the common loop drives.

    Attributes:
        params: what this rank optimises.
        accumulate: (tokens, targets, valid) of a global batch: adds the gradients into ``params`` and returns
            this rank's share of the loss; the shares of all ranks add up to it.
        collect: the whole state dict on rank 0, None elsewhere; all ranks call it.
        clip: (largest norm): scales the gradients down to it and returns the norm they had.
        update: (learning rate, largest norm): in the place of ``clip`` and of the common AdamW clips, updates and
            clears the gradients; returns the norm they had.
        keeps_grads: zero the gradients in place between steps instead of dropping them.
    """

    params: list[nn.Parameter]
    accumulate: Callable[[Tensor, Tensor, int], Tensor]
    collect: Callable[[], dict[str, Tensor] | None]
    clip: Callable[[float], Tensor] | None = None
    update: Callable[[float, float], Tensor] | None = None
    keeps_grads: bool = False


def train(job: PeerJob, make: Callable[[], Side]) -> PeerResult:
    """The loop of every peer: accumulate, clip, step.

    Only the peer's own communication happens inside a step: losses are summed over ranks after the last one.
    """
    torch.set_num_threads(job.threads)
    baseline_bytes = reset_peak()
    side = make()
    update = side.update or _update(job, side)
    shares, norms, seconds, cpu_seconds = [], [], [], []
    dist.barrier()
    for step, (tokens_BS, targets_BS) in enumerate(job.batches):
        start, cpu_start = time.perf_counter(), time.process_time()
        valid = int((targets_BS != IGNORE).sum())
        shares.append(side.accumulate(tokens_BS, targets_BS, valid))
        norms.append(update(job.lr[step] if isinstance(job.lr, tuple) else job.lr, job.clip_norm))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    peak_rss_bytes = peak_bytes()
    losses = torch.stack(shares).double()
    dist.all_reduce(losses)
    return PeerResult(
        losses=losses.tolist(),
        grad_norms=[float(norm) for norm in norms],
        step_seconds=seconds,
        cpu_seconds=cpu_seconds,
        baseline_bytes=baseline_bytes,
        peak_rss_bytes=peak_rss_bytes,
        weights=side.collect() if job.keep_weights else None,
    )


def _update(job: PeerJob, side: Side) -> Callable[[float, float], Tensor]:
    optimizer, clip = adamw(job, side.params), side.clip
    assert clip is not None, "who does not update, clips"

    def update(lr: float, largest: float) -> Tensor:
        norm = clip(largest)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=not side.keeps_grads)
        return norm

    return update


def adamw(job: PeerJob, params: list[nn.Parameter]) -> torch.optim.AdamW:
    """Torch's fused AdamW: matrices decay, vectors do not."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for param in params:  # the fused kernel takes DTensors or plain tensors, never both at once
        groups.setdefault((param.ndim > 1, isinstance(param, DTensor)), []).append(param)
    settings = [
        {"params": group, "weight_decay": job.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), group in groups.items()
    ]
    return torch.optim.AdamW(settings, betas=(job.beta1, job.beta2), eps=job.eps, fused=True, foreach=False)


def decoder(job: PeerJob) -> Decoder:
    """The decoder with the job's first weights; compiled in place where the job says so."""
    with torch.device("meta"):
        model = Decoder(job.shape)
    model.to_empty(device="cpu")
    model.load_state_dict(job.weights)
    if job.shape.tied:
        model.head.lm_head.weight = model.embed.embed_tokens.weight  # to_empty parts what is tied
    if job.compile:
        for block in model.block:
            block.compile()
        model.head.compile()
    return model


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The token cross-entropies, summed in fp32."""
    logits_TV = logits_BSV.flatten(0, 1).float()
    return F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORE, reduction="sum")


def microbatches(job: PeerJob, tokens_BS: Tensor, targets_BS: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows cut into microbatches."""
    rows = tokens_BS.shape[0]
    if rows % job.microbatch:
        raise ValueError(f"microbatch = {job.microbatch} does not divide the {rows} sequences of a rank.")
    return list(zip(tokens_BS.split(job.microbatch), targets_BS.split(job.microbatch), strict=True))


def whole(value: Tensor) -> Tensor:
    """A tensor that is cut over ranks, gathered; all ranks call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_state(model: nn.Module, rank: int) -> dict[str, Tensor] | None:
    """The whole state dict on rank 0, None elsewhere; all ranks call it."""
    state = {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
    return state if rank == 0 else None


def initial_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """The engine's first weights under the decoder's own names."""
    return {
        f"{unit.name}.{local}": initial(spec, _sizes(shape)[f"{unit.name}.{local}"], seed)
        for unit in units(shape)
        for local, spec in unit.params.items()
    }


def random_batches(
    shape: ModelShape,
    steps: int,
    sequences: int,
    sequence_tokens: int,
    *,
    padded: bool = False,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Batches of uniform tokens. ``padded`` hides the end of each sequence, another length in each row."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        text = torch.randint(shape.vocab, (sequences, sequence_tokens + 1), generator=generator)
        tokens_BS, targets_BS = text[:, :-1].contiguous(), text[:, 1:].clone()
        if padded:
            kept = torch.randint(1, sequence_tokens + 1, (sequences, 1), generator=generator)
            targets_BS[torch.arange(sequence_tokens) >= kept] = IGNORE
        batches.append((tokens_BS, targets_BS))
    return batches


def _sizes(shape: ModelShape) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {f"{unit.name}.{k}": v.shape for unit in units(shape) for k, v in unit.build().state_dict().items()}


def reset_peak() -> int:
    """Gives free memory back, sets the high-water mark to what is resident now, and returns that, in bytes."""
    gc.collect()
    if sys.platform != "linux":
        return peak_bytes()  # elsewhere the mark cannot be set back
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most memory that was resident since the mark was set."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def autocast(job: PeerJob) -> torch.autocast:
    """bf16 products on fp32 weights. Keeping the bf16 copies for a whole step saved no time."""
    return torch.autocast("cpu", torch.bfloat16, enabled=job.dtype == "bf16")
