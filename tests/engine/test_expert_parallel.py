"""Expert parallelism on real ranks: outputs, gradients and counts are those of one device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from longer import many_ranks
from superstep.engine.layers.implementation import install
from superstep.engine.parallel.expert import ExpertParallel, SequenceParts, splitting_tokens
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.moe import MixtureOfExperts
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

pytestmark = pytest.mark.multiproc

B, S, D, E = 4, 16, 32, 8
EXPERTS = ("experts.gate_proj.weight", "experts.up_proj.weight", "experts.down_proj.weight")


@dataclass(frozen=True)
class Case:
    """A way to lay the block out.

    Attributes:
        ep: neighbours that share out the experts.
        parts: neighbours that share out the positions of their sequences; the others have sequences of their own.
        order: how: in runs, or in zig-zag as context parallelism does.
        is_whole: whether the stream is whole on the ranks that share positions, as without sequence parallelism.
        favourite: added to the first expert's logit for every token.
    """

    ep: int
    parts: int = 1
    order: str = "runs"
    is_whole: bool = False
    router: str = "dropless"
    dtype: torch.dtype = torch.float32
    favourite: float = 0.0
    shared: int = 0


def positions(case):
    """[parts, S / parts]"""
    if case.order == "runs":
        return torch.arange(S).view(case.parts, -1)
    chunks = torch.arange(S).view(2 * case.parts, -1)
    return torch.stack([torch.cat((chunks[p], chunks[-1 - p])) for p in range(case.parts)])


def block_of(case):
    config = ModelConfig(
        name="tiny", width=D, heads=2, kv_heads=2, ffn=24, experts=E, router=case.router, shared_experts=case.shared
    )
    shape = shape_of(config)
    shape = replace(shape, moe=replace(shape.moe, balance_weight=0.5, z_weight=0.1))
    generator = torch.Generator().manual_seed(0)
    block = MixtureOfExperts(shape, 2)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0.0, param.shape[-1] ** -0.5, generator=generator)
        # Inputs have 1 as their first number.
        block.gate.weight[0, 0] += case.favourite
    return block.to(case.dtype)


def inputs(case):
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(B, S, D, generator=generator) for _ in range(2))
    x[..., 0] = 1.0
    return x.to(case.dtype), grad.to(case.dtype)


def now(rows):
    return DispatchContext(sequences=tuple(rows), batch_sequences=B, seed=3, step=4)


def one_device(case):
    block, exchange = block_of(case), LocalDispatch(now(range(B)))
    x, grad = inputs(case)
    x.requires_grad_()
    y = block(x, exchange=exchange)
    y.backward(grad)
    return y.detach(), x.grad, {n: p.grad for n, p in block.named_parameters()}, exchange.take_counts()[2]


def groups_of(world, size):
    """This rank's group of neighbours."""
    found = None
    for start in range(0, world, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks)
        found = group if dist.get_rank() in ranks else found
    return found if size > 1 else None


def laid_out(rank, world, case):
    ep, sequence = groups_of(world, case.ep), groups_of(world, case.parts)
    place, own = rank % case.ep, rank // case.parts
    count = B * case.parts // world
    rows = list(range(own * count, (own + 1) * count))
    block = block_of(case)
    held = E // case.ep
    for name in EXPERTS:
        path, _, leaf = name.rpartition(".")
        layer = block.get_submodule(path)
        cut = getattr(layer, leaf).detach()[place * held : (place + 1) * held].clone()
        setattr(layer, leaf, torch.nn.Parameter(cut))
    parts = sequence and SequenceParts(group=sequence, positions=positions(case))
    exchange = ExpertParallel(ep, parts, now(rows))
    mine = positions(case)[rank % case.parts]
    x, grad = (t[rows] for t in inputs(case))
    if case.is_whole:
        install(block, (), splitting_tokens(sequence))
    else:
        x, grad = (t[:, mine].contiguous() for t in (x, grad))
    x.requires_grad_()
    y = block(x, exchange=exchange)
    y.backward(grad)
    grads = {n: p.grad for n, p in block.named_parameters()}
    told = exchange.take_counts()[2]
    numbers = (told.chosen.tolist(), told.dropped.tolist(), float(told.balance), float(told.z))
    return rows, mine.tolist(), y.detach().float(), x.grad.float(), {n: g.float() for n, g in grads.items()}, numbers


def _run_all(rank, world, cases):
    torch.set_num_threads(1)
    return [laid_out(rank, world, case) for case in cases]


def assert_same(case, ranks):
    y, dx, grads, told = one_device(case)
    # fp32: sums of up to 64 products in another order. bf16: a rounding of 2^-9 in each of a few operations, and
    # parts of a gradient that are rounded before they are summed.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 5e-2, "atol": 8e-2}
    total = {name: torch.zeros(g.shape) for name, g in grads.items()}
    counts = torch.zeros(2, E, dtype=torch.long)
    losses = torch.zeros(2)
    for rank, (rows, mine, y_part, dx_part, grads_part, (chosen, dropped, balance, z)) in enumerate(ranks):
        where = slice(None) if case.is_whole else mine
        torch.testing.assert_close(y_part, y[rows][:, where].float(), **tolerance)
        torch.testing.assert_close(dx_part, dx[rows][:, where].float(), **tolerance)
        held = E // case.ep
        for name, part in grads_part.items():
            into = total[name]
            if name in EXPERTS:
                place = rank % case.ep
                into = into[place * held : (place + 1) * held]
            into += part
        if rank % case.parts == 0:
            counts += torch.tensor([chosen, dropped])
            losses += torch.tensor([balance, z])
    for name, gradient in grads.items():
        error = (total[name] - gradient.float()).norm() / gradient.float().norm().clamp_min(1e-6)
        assert error < (1e-5 if case.dtype == torch.float32 else 2e-2), (name, float(error))
    assert counts[0].tolist() == told.chosen.tolist()
    assert counts[1].tolist() == told.dropped.tolist()
    torch.testing.assert_close(losses, torch.stack((told.balance, told.z)))
    return told


def prove(pool, world, cases):
    by_rank = pool.run(world, _run_all, cases)
    found = []
    for number, case in enumerate(cases):
        found.append(assert_same(case, [results[number] for results in by_rank]))
    return found


LAYOUTS = {
    2: [
        Case(ep=2),
        Case(ep=1, parts=2),
        Case(ep=2, parts=2),
        Case(ep=2, parts=2, order="zigzag"),
        Case(ep=2, parts=2, is_whole=True, shared=1),
        Case(ep=2, parts=2, shared=1),
    ],
    4: [
        Case(ep=4),
        Case(ep=2),
        Case(ep=4, parts=2),
        Case(ep=2, parts=4, order="zigzag"),
        Case(ep=4, parts=4, is_whole=True),
    ],
}


@pytest.mark.parametrize("world", many_ranks([2, 4]))
@pytest.mark.parametrize("router", ["dropless", "switch", "top2", "noisy-topk"])
def test_every_layout_computes_what_one_device_computes(pool, world, router):
    told = prove(pool, world, [replace(case, router=router) for case in LAYOUTS[world]])
    if router in ("switch", "top2"):
        assert all(int(each.dropped.sum()) > 0 for each in told)


def test_experts_and_ranks_that_get_nothing(pool):
    """All tokens want one expert: the other ranks get no row at all, and with a capacity most tokens stay at home."""
    cases = [Case(ep=4, router=router, favourite=40.0) for router in ("switch", "dropless", "top2")]
    for told in prove(pool, 4, cases):
        assert int(told.chosen[0]) == B * S
    cases = [replace(case, parts=4, order="zigzag") for case in cases]
    assert int(prove(pool, 4, cases)[0].dropped[0]) > B * S // 2


def test_bf16(pool):
    prove(pool, 2, [Case(ep=2, dtype=torch.bfloat16), Case(ep=2, parts=2, dtype=torch.bfloat16, router="switch")])
