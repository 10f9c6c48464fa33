"""Peers that split the batch: one process, DistributedDataParallel, FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.peers_common import PeerJob, Side, autocast, decoder, full_state, loss_sum, microbatches, whole


def one_process(rank: int, world: int, job: PeerJob) -> Side:
    """The whole batch on each rank: meant for world 1 and ``job.threads`` threads."""
    model = decoder(job)
    criterion = _criterion(job)

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        for tokens, targets in microbatches(job, tokens_BS, targets_BS):
            with autocast(job):
                loss = criterion(model(tokens), targets) / valid
            loss.backward()
            total += loss.detach()
        return total / world

    return Side(
        params=list(model.parameters()),
        accumulate=accumulate,
        clip=lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        collect=lambda: full_state(model, rank),
    )


def ddp(rank: int, world: int, job: PeerJob) -> Side:
    """DistributedDataParallel: whole weights everywhere, gradients all-reduced once a step."""
    model = decoder(job)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    criterion = _criterion(job)

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        pieces = microbatches(job, tokens_BS.chunk(world)[rank], targets_BS.chunk(world)[rank])
        for number, (tokens, targets) in enumerate(pieces, start=1):
            with wrapped.no_sync() if number < len(pieces) else nullcontext():
                with autocast(job):
                    loss = criterion(wrapped(tokens), targets) / valid
                (loss * world).backward()  # DDP averages over ranks; the divisor is already the whole batch's
            total += loss.detach()
        return total

    return Side(
        params=list(model.parameters()),
        accumulate=accumulate,
        clip=lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        collect=lambda: full_state(model, rank),
        keeps_grads=True,  # they are views of DDP's buckets: dropping them would hold the gradients twice
    )


def fsdp2(rank: int, world: int, job: PeerJob) -> Side:
    """fully_shard on each block and on the root: weights, gradients and moments are cut over the ranks."""
    model = decoder(job)
    kind = torch.bfloat16 if job.dtype == "bf16" else None
    settings = {
        "mesh": init_device_mesh("cpu", (world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32),
        "reshard_after_forward": job.reshard_after_forward,
    }
    for block in model.block:
        fully_shard(block, **settings)
    fully_shard(model, **settings | {"reshard_after_forward": False})  # the head's backward follows at once
    criterion = _criterion(job)

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        pieces = microbatches(job, tokens_BS.chunk(world)[rank], targets_BS.chunk(world)[rank])
        for number, (tokens, targets) in enumerate(pieces, start=1):
            is_last = number == len(pieces)
            model.set_requires_gradient_sync(is_last or job.reduce_every_microbatch)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last or job.reshard_after_forward)
            loss = criterion(model(tokens), targets) / valid
            (loss * world).backward()  # FSDP averages over ranks too
            total += loss.detach()
        return total

    return Side(
        params=list(model.parameters()),
        accumulate=accumulate,
        clip=lambda norm: whole(nn.utils.clip_grad_norm_(model.parameters(), norm)),
        collect=lambda: full_state(model, rank),
    )


def _criterion(job: PeerJob) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(loss_sum) if job.compile else loss_sum
