"""Peers that wrap a training loop: DeepSpeed's ZeRO and Accelerate, where they are installed.

    pip install -e ".[peers]"

Neither is needed by anything else here, so that they are imported where they train.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from bench.peers_common import PeerJob, Side, adamw, decoder, full_state, loss_sum, microbatches


def missing(peer: str) -> str:
    """Why a peer cannot train here, in a line; empty where it can."""
    package = {"zero2": "deepspeed", "zero3": "deepspeed", "accelerate": "accelerate"}.get(peer)
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed; pip install {package} brings it"


def zero2(rank: int, world: int, job: PeerJob) -> Side:
    """DeepSpeed, gradients and moments cut."""
    return _deepspeed(2, rank, world, job)


def zero3(rank: int, world: int, job: PeerJob) -> Side:
    """DeepSpeed, weights cut too."""
    return _deepspeed(3, rank, world, job)


def _tell_launcher(rank: int, world: int, threads: int) -> None:
    """Both read the environment of a launcher, even where a process group stands; Accelerate chooses threads by it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": str(threads)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}


def _deepspeed(stage: int, rank: int, world: int, job: PeerJob) -> Side:
    import deepspeed

    _tell_launcher(rank, world, job.threads)
    model = decoder(job)
    rows = job.batches[0][0].shape[0] // world
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=adamw(job, list(model.parameters())),
        config={
            "train_micro_batch_size_per_gpu": job.microbatch,
            "gradient_accumulation_steps": rows // job.microbatch,
            "gradient_clipping": job.clip_norm,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.dtype == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "steps_per_print": 10**9,
        },
    )

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        pieces = microbatches(job, tokens_BS.chunk(world)[rank], targets_BS.chunk(world)[rank])
        for number, (tokens, targets) in enumerate(pieces, start=1):
            loss = loss_sum(engine(tokens), targets) / valid
            engine.backward(loss * world * len(pieces))  # it divides by both
            total += loss.detach()
            if number < len(pieces):
                engine.step()  # notes that a microbatch is done
        return total

    def update(lr: float, _: float) -> Tensor:
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        engine.step()
        return torch.as_tensor(float(engine.get_global_grad_norm()))

    def collect() -> dict[str, Tensor] | None:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return full_state(model, rank)

    return Side(params=[], accumulate=accumulate, update=update, collect=collect)


def accelerate(rank: int, world: int, job: PeerJob) -> Side:
    """Accelerate as its guide has it: DDP, its autocast, its accumulation."""
    from accelerate import Accelerator

    _tell_launcher(rank, world, job.threads)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if job.dtype == "bf16" else "no",
        gradient_accumulation_steps=job.batches[0][0].shape[0] // world // job.microbatch,
    )
    model = decoder(job)
    wrapped, optimizer = accelerator.prepare(model, adamw(job, list(model.parameters())))

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        pieces = microbatches(job, tokens_BS.chunk(world)[rank], targets_BS.chunk(world)[rank])
        for tokens, targets in pieces:
            with accelerator.accumulate(wrapped):
                loss = loss_sum(wrapped(tokens), targets) / valid
                accelerator.backward(loss * world * len(pieces))  # both are divided by
                total += loss.detach()
        return total

    def update(lr: float, largest: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm: Any = accelerator.clip_grad_norm_(wrapped.parameters(), largest)
        optimizer.step()
        optimizer.zero_grad()
        return torch.as_tensor(norm)

    def collect() -> dict[str, Tensor] | None:
        return full_state(accelerator.unwrap_model(wrapped), rank)

    return Side(params=[], accumulate=accumulate, update=update, collect=collect)
