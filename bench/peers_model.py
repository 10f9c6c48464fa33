"""Peers that split the model: DTensor tensor parallelism, torch.distributed.pipelining."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.peers_common import PeerJob, Side, autocast, decoder, full_state, loss_sum, microbatches, whole
from superstep.model.decoder import Decoder
from superstep.model.norm import RMSNorm

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def tensor_parallel(rank: int, world: int, job: PeerJob) -> Side:
    """Megatron's cut by parallelize_module: heads, feed-forward and vocabulary; the loss stays cut too.

    With ``job.sequence_parallel`` the residual stream and its norms are cut over positions too (Korthikanti
    2022).
    """
    if job.dtype != "fp32" or job.compile:
        raise ValueError(f"the peer {job.peer} runs fp32 without compile only; got {job.dtype}, {job.compile}.")
    model = decoder(job)
    mesh = init_device_mesh("cpu", (world,))
    _use_torch_norms(model, job, is_all=job.sequence_parallel)
    _cut(model, mesh, is_sequence_parallel=job.sequence_parallel)
    if job.shape.tied:
        model.head.lm_head.weight = model.embed.embed_tokens.weight
    params = list(model.parameters())

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        total = torch.zeros(())
        for tokens, targets in microbatches(job, tokens_BS, targets_BS):
            with loss_parallel():
                loss = loss_sum(model(tokens), targets) / valid
                loss.backward()
            total += whole(loss.detach())
        _settle(params)
        return total / world  # every rank has the whole loss

    return Side(
        params=params,
        accumulate=accumulate,
        clip=lambda norm: _clip_mixed(params, norm),
        collect=lambda: full_state(model, rank),
    )


def pipelining(rank: int, world: int, job: PeerJob) -> Side:
    """torch.distributed.pipelining with one stage on each rank."""
    if job.compile:
        raise ValueError("the peer pipelining runs without compile only.")
    if job.shape.tied:
        raise ValueError("torch.distributed.pipelining does not tie weights across stages; set tied = False.")
    stage = _Stage(job, rank, world)
    valid_tokens = torch.ones(())

    def criterion(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return loss_sum(logits_BSV, targets_BS) / valid_tokens

    count = job.batches[0][0].shape[0] // job.microbatch
    stages = PipelineStage(stage, rank, world, torch.device("cpu"))
    # scale_grads would divide by the microbatches; the loss already has its divisor.
    schedule = _SCHEDULES[job.schedule](stages, count, loss_fn=criterion, scale_grads=False)

    def accumulate(tokens_BS: Tensor, targets_BS: Tensor, valid: int) -> Tensor:
        valid_tokens.fill_(valid)
        inputs = (tokens_BS,) if rank == 0 else ()
        losses: list[Tensor] = []
        ends = {"target": targets_BS, "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **ends, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    return Side(
        params=list(stage.parameters()),
        accumulate=accumulate,
        clip=lambda norm: _clip_stages(list(stage.parameters()), norm),
        collect=lambda: _gather_stages(stage, rank, world),
    )


class _Stage(nn.Module):
    """A run of the decoder's units; parameters keep the decoder's names."""

    def __init__(self, job: PeerJob, stage: int, stages: int) -> None:
        super().__init__()
        model = decoder(job)
        owned = even_stages(job, stages)[stage]
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.block = nn.ModuleDict({str(i): model.block[i] for i in owned})
        self.head = model.head if stage == stages - 1 else nn.Identity()
        self._job = job

    def forward(self, x: Tensor) -> Tensor:
        with autocast(self._job):
            x = self.embed(x)
            for block in self.block.values():
                x = block(x)
            return self.head(x)


def even_stages(job: PeerJob, stages: int) -> list[range]:
    """The blocks of each stage, cut so that the stage with the most multiplications has as few as can be.

    The head counts as a stage's extra load, the embedding as none.
    """
    shape = job.shape
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    tokens = job.batches[0][0].shape[1]
    block = shape.width * (heads + 3 * shape.ffn) + shape.heads * shape.head_dim * tokens  # causal: half of 2·T
    head = shape.width * shape.vocab

    def dearest(cuts: tuple[int, ...]) -> int:
        sizes = [b - a for a, b in itertools.pairwise((0, *cuts, shape.layers))]
        return max(block * size + head * (i == stages - 1) for i, size in enumerate(sizes))

    cuts = min(itertools.combinations(range(1, shape.layers + 1), stages - 1), key=dearest)
    return [range(a, b) for a, b in itertools.pairwise((0, *cuts, shape.layers))]


def _use_torch_norms(model: Decoder, job: PeerJob, *, is_all: bool) -> None:
    """Norms whose input is a DTensor become torch's own: on a CPU the decoder's are for plain tensors."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, RMSNorm) and (is_all or name in ("q_norm", "k_norm")):
                replacement = nn.RMSNorm(norm.weight.shape[0], job.shape.norm_eps)
                replacement.weight = norm.weight
                setattr(parent, name, replacement)


def _cut(model: Decoder, mesh: DeviceMesh, *, is_sequence_parallel: bool) -> None:
    """Replaces the decoder's parameters by DTensors, and puts the collectives into hooks."""
    between = Shard(1) if is_sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head.lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.block)):
        at = f"block.{i}"
        plan |= {
            f"{at}.self_attn": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
            f"{at}.mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
            f"{at}.self_attn.o_proj": RowwiseParallel(output_layouts=between),
            f"{at}.mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {f"{at}.{name}": ColwiseParallel() for name in columns}
        if isinstance(model.block[i].self_attn.q_norm, nn.RMSNorm):  # its weight serves heads of every rank
            per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {f"{at}.self_attn.q_norm": per_head, f"{at}.self_attn.k_norm": per_head}
    if is_sequence_parallel:
        norms = [name for name, module in model.named_modules() if isinstance(module, nn.RMSNorm)]
        plan |= {name: SequenceParallel(use_local_output=True) for name in norms if name not in plan}
    parallelize_module(model, mesh, plan)


def _settle(params: list[nn.Parameter]) -> None:
    """Sums over ranks the gradients that still are partial sums: those of norms on a cut residual stream."""
    for param in params:
        if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)


def _clip_mixed(params: list[nn.Parameter], largest: float) -> Tensor:
    """Clipping where some gradients are DTensors and some are plain: torch's own takes one kind at a time."""
    grads = [p.grad for p in params if p.grad is not None]
    kinds = [[g for g in grads if isinstance(g, DTensor)], [g for g in grads if not isinstance(g, DTensor)]]
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in kinds if kind]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
    for grad in grads:
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(scale)
    return norm


def _clip_stages(params: list[nn.Parameter], largest: float) -> Tensor:
    """Clipping over all stages."""
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]) ** 2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    nn.utils.clip_grads_with_norm_(params, largest, norm)
    return norm


def _gather_stages(stage: nn.Module, rank: int, world: int) -> dict[str, Tensor] | None:
    states: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object({name: value.detach().clone() for name, value in stage.state_dict().items()}, states)
    return None if states is None else {name: value for state in states for name, value in state.items()}
