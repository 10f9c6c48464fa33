"""Predicted bytes: the buffers that the runtime makes, and what real modules keep for their backward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from superstep.comm.device import Device
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.build_modules import build_loss, build_module, on_part, selective
from superstep.engine.flat.buffers import UnitBuffers, buffer_dtype
from superstep.engine.flat.layout import lay_out
from superstep.engine.layer_table import LayerContext
from superstep.engine.layers.grad_accumulation import GradientSums, input_gradients
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.objective import LossTarget
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from superstep.plan.mesh import Coordinate
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.style import GEMMA, OLMO, BlockStyle
from superstep.plan.optimizers import MOMENTS
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import high_water
from superstep.train.weights.model import units_of

# Sizes at which no buffer is a multiple of the alignment by itself.
ODD = ModelConfig(name="tiny", layers=3, width=36, heads=4, kv_heads=2, head_dim=10, ffn=50, vocab=102)
MODEL = ModelConfig(name="tiny", layers=2)
FFN, VOCAB = (("ffn", "none"),), (("vocab", "none"),)


def run_of(*, model=MODEL, compute="fp32", exact=False, sequence_tokens=32, lora=None, optimizer="adamw", **layout):
    layout.setdefault("microbatch", 2)
    return resolve(
        RunConfig(
            model=model,
            data=DataConfig(sequence_tokens=sequence_tokens),
            train=TrainConfig(batch_sequences=2 * layout.get("dp", 1) * layout["microbatch"], optimizer=optimizer),
            plan=PlanConfig(**layout),
            numerics=NumericsConfig(compute=compute, exact=exact),
            lora=lora,
        )
    )


@st.composite
def runs(draw):
    moe = draw(st.sampled_from([{}, {"experts": 3, "router": "noisy-topk", "shared_experts": 1}]))
    model = replace(ODD, tied=draw(st.booleans()), qk_norm=draw(st.booleans()), **moe)
    model = replace(model, vocab=draw(st.sampled_from([101, 102])))
    targets = st.sampled_from([("all-linear",), ("q_proj",), ("o_proj", "up_proj"), ("down_proj", "k_proj")])
    lora = None if model.experts else draw(st.none() | st.builds(LoraConfig, rank=st.integers(1, 5), targets=targets))
    rules = draw(st.sampled_from([(), VOCAB] if model.experts else [(), FFN, VOCAB, FFN + VOCAB]))
    dp = draw(st.sampled_from([1, 2, 3]))
    return run_of(
        model=model,
        lora=lora,
        exact=not rules and draw(st.booleans()),  # its sums are those of the default rules
        compute=draw(st.sampled_from(["fp32", "bf16"])),
        optimizer=draw(st.sampled_from(sorted(MOMENTS))),
        pp=draw(st.sampled_from([1, 2, 3])),
        dp=dp,
        ep=draw(st.sampled_from([1, 3])) if model.experts and dp == 3 else 1,
        tp=draw(st.sampled_from([1, 2])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=draw(st.booleans()),
        rules=rules,
    )


def buffers(run, at, unit):
    """A unit's buffers as the rank at ``at`` has them: one for each family of its parameters."""
    plan = run.plan
    layouts = lay_out(
        units_of(run),
        plan.mesh,
        at,
        plan.rules,
        sequence_parallel=plan.sequence_parallel,
        padding=plan.padding,
        is_exact=plan.grain is not None,
    )
    return [
        UnitBuffers(
            layout,
            zero=plan.zero,
            shards=plan.mesh.shards(layout.family),
            place=plan.mesh.sharer(layout.family, at) % plan.mesh.shards(layout.family),
            compute=buffer_dtype(layout.family, DTYPES[run.config.numerics.compute]),
            device=Device("cpu"),
            seed=0,
            moments=MOMENTS[run.config.train.optimizer],
            is_exact=plan.grain is not None,
            is_frozen=not plan.trains(layout.family),
        )
        for layout in layouts[unit]
    ]


@settings(max_examples=60)
@given(runs(), st.data())
def test_buffers_are_predicted_to_the_byte(run, data):
    program = compile_step(run.plan)
    at = run.plan.mesh.at(data.draw(st.integers(0, run.plan.mesh.world - 1)))
    made = [b.bytes() for unit in program.list_held_units(at.pp) for b in buffers(run, at, unit)]
    predicted = rank_bytes(run, program)[at.pp]
    assert predicted.params == sum(b.params for b in made)
    assert predicted.gradients == sum(b.gradients for b in made)
    assert predicted.optimizer == sum(b.optimizer for b in made)
    assert sum(b.transient for b in made) == 0


@settings(max_examples=20)
@given(runs())
def test_what_a_step_fetches_and_gathers_is_predicted_to_the_byte(run):
    at = Coordinate(pp=0, dp=0, cp=0, tp=0)
    for number, sizes in enumerate(unit_bytes(run)):
        made = buffers(run, at, number)
        for b in made:
            b.restore_full()
            b.ready_gradient()
        assert sum(b.bytes().transient for b in made) == sizes.params + sizes.gradient


BLOCKS = ModelConfig(name="tiny", layers=2, width=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=102)


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("plan", [{}, {"dp": 3, "zero": 3}, {"dp": 2, "tp": 2, "zero": 1}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_base_in_blocks_is_predicted_to_the_byte(plan, base, compute):
    run = run_of(model=BLOCKS, lora=LoraConfig(base=base), compute=compute, **plan)
    program = compile_step(run.plan)
    for rank in range(run.plan.mesh.world):
        at = run.plan.mesh.at(rank)
        made = [b.bytes() for unit in program.list_held_units(at.pp) for b in buffers(run, at, unit)]
        assert rank_bytes(run, program)[at.pp].params == sum(b.params for b in made)
    for number, sizes in enumerate(unit_bytes(run)):
        made = buffers(run, Coordinate(pp=0, dp=0, cp=0, tp=0), number)
        for b in made:
            b.restore_full()
            b.ready_gradient()
        assert sum(b.bytes().transient for b in made) == sizes.params + sizes.gradient


def test_the_fullest_rank_holds_all_its_categories_at_once():
    run = run_of(pp=2, dp=2, zero=3)
    program = compile_step(run.plan)
    for rank, peak in zip(rank_bytes(run, program), high_water(program, unit_bytes(run)), strict=True):
        assert rank.peak == peak
        assert rank.bytes == rank.params + rank.gradients + rank.optimizer + rank.batch + peak.bytes


# What stays between a forward and its backward, by two measures: what autograd saves, and what memory outlives the
# forward. Parameters, their gradients and the rotary tables of a sequence, or slopes, are there anyway.


class Born(TorchDispatchMode):
    """Notes every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())
        return out

    def alive(self):
        return {address: size for ref, address, size in self.storages.values() if not ref.expired()}


@dataclass
class Built:
    """A unit as the engine builds it.

    Attributes:
        forward: of its input ``x``.
        own: the addresses of its buffers.
    """

    forward: Callable[[], torch.Tensor]
    x: torch.Tensor
    own: set[int]
    parameters: tuple[torch.nn.Parameter, ...]
    sums: GradientSums


def built(run, unit, *, group=None, is_selective=False):
    mesh, last = run.plan.mesh, len(run.plan.units) - 1
    made = [b for u in run.plan.params[unit] for b in buffers(run, mesh.at(0), u)]
    for b in made:
        b.restore_full()
        b.ready_gradient()
    spec = units_of(run)[unit]
    shared = {slot.spec.name: b.params[slot.local] for b in made for slot in b.layout.slots}
    params = {local: shared[param.name] for local, param in spec.params.items()}
    sums = GradientSums()
    context = LayerContext(
        tp=group,
        rules=run.plan.rules,
        sums=sums,
        sequence_parallel=run.plan.sequence_parallel,
        is_first=unit == 0,
        is_compiled=run.config.numerics.compile,
    )
    module, _ = build_module(spec, params, context)
    exchange = LocalDispatch(DispatchContext(sequences=tuple(range(run.plan.microbatch)), step=0))
    given = {"exchange": exchange} if "exchange" in spec.takes else {}
    is_cut = run.plan.rules.cut("vocab") is not None
    is_straight = run.plan.zero < 2 or mesh.dp == 1
    loss = build_loss(
        module,
        group if is_cut else None,
        is_straight=is_straight,
        vocab=run.shape.vocab,
    )
    if group is not None and not is_cut and run.plan.sequence_parallel:
        loss = on_part(loss, group)

    def whole(x, sight):
        return module(x, **given)

    compute = selective(whole) if is_selective else whole
    rows, tokens = run.plan.microbatch, run.config.data.sequence_tokens
    targets = torch.randint(run.shape.vocab, (rows, tokens))
    x = torch.randint(run.shape.vocab, (rows, tokens))
    if unit > 0:
        part = tokens // mesh.tp if run.plan.sequence_parallel else tokens
        x = torch.randn(rows, part, run.shape.width, dtype=DTYPES[run.config.numerics.compute]).requires_grad_()

    def forward():
        y = compute(x, None)
        exchange.take_counts()  # they stay in memory until they are taken
        return loss(y, LossTarget(targets), 0.5) if unit == last else y

    own = {t.untyped_storage().data_ptr() for b in made for t in (b.full, b.gradient)}
    own.add(targets.untyped_storage().data_ptr())
    return Built(forward, x, own, [(p, p.grad.add_) for p in module.parameters()], sums)


def tables_bytes(run):
    if run.shape.positions != "rope":  # ALiBi has slopes of its heads
        return run.shape.heads * 4 if run.shape.positions == "alibi" else 0
    element = DTYPES[run.config.numerics.compute].itemsize
    return 2 * run.config.data.sequence_tokens * run.shape.head_dim * element


def saved(run, unit, **how):
    """Bytes of the storages that autograd saves in a unit's forward."""
    made = built(run, unit, **how)
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = made.forward()
    del y
    tables = tables_bytes(run) if 0 < unit < len(run.plan.units) - 1 else 0
    return sum(size for address, size in found.items() if address not in made.own) - tables


def outlived(run, unit, **how):
    """Bytes of the input and of all that a unit's forward makes and does not drop, but for its output."""
    made = built(run, unit, **how)
    made.forward()  # makes the rotary tables
    with Born() as born:
        y = made.forward()
    elsewhere = {*made.own, made.x.untyped_storage().data_ptr()}  # a view of the input is none of what is made
    size = sum(size for address, size in born.alive().items() if address not in elsewhere)
    return size - y.untyped_storage().nbytes() + made.x.untyped_storage().nbytes()


def between(run, unit, **how):
    """Bytes that a unit keeps between the two halves of its backward pass."""
    made = built(run, unit, **how)
    made.forward()
    with Born() as born:
        y = made.forward()
        edge = get_gradient_edge(y)
        gradient = torch.ones_like(y)
        del y
        found, later = input_gradients([made.x], edge, gradient, made.parameters, made.sums)
        del edge, gradient
    sizes = born.alive()
    if found:
        # The input is gone by then, unless a product needs it, and its gradient on its way.
        for gone in found if run.shape.style.norms == "after" else (*found, made.x):
            sizes.pop(gone.untyped_storage().data_ptr(), None)
    assert later
    return sum(size for address, size in sizes.items() if address not in made.own)


@pytest.fixture
def pair():
    """A tp group of two ranks that sends nothing: this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


COMPUTE = pytest.mark.parametrize("compute", ["fp32", "bf16"])
QK_NORM = pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
SPLIT = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])


@COMPUTE
@QK_NORM
def test_a_block_keeps_what_is_predicted(compute, qk_norm):
    run = run_of(model=replace(MODEL, qk_norm=qk_norm), compute=compute)
    sizes = unit_bytes(run)[1]
    assert saved(run, 1) == sizes.kept_all
    assert outlived(run, 1) == sizes.kept_all
    assert outlived(run, 1, is_selective=True) == sizes.kept_selective


STYLED = [
    {"qk_norm": True, "style": OLMO},
    {"style": replace(GEMMA, soft_cap=2.0, logit_cap=3.0)},
    {"qk_norm": True, "window": 12, "full_layers": (1,), "style": replace(GEMMA, local_theta=500.0, query_scale=0.2)},
    {"style": BlockStyle(embedding_scale=2.0, query_scale=0.4, residual_scale=0.3, logit_divisor=3.0)},
    {"positions": "alibi"},
    {"positions": "t5", "max_distance": 40},
    {"positions": "relative", "max_distance": 12},
]


@COMPUTE
@pytest.mark.parametrize(
    "fields",
    [{"qkv_bias": True}, {"window": 12}, {"window": 32}, {"window": 12, "full_layers": (0,)}, *STYLED],
    ids=str,
)
def test_what_a_foreign_block_has_besides_is_predicted(compute, fields, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hf_config(replace(shape_of(MODEL), **fields))))
    run = run_of(model=replace(MODEL, name=str(path)), compute=compute)
    sizes = unit_bytes(run)[1]
    assert saved(run, 1) == sizes.kept_all
    assert outlived(run, 1) == sizes.kept_all
    assert outlived(run, 1, is_selective=True) == sizes.kept_selective
    assert between(run, 1) == sizes.product_inputs + sizes.product_gradients


ROUTED = [
    {"router": "dropless", "shared_experts": 2},
    {"router": "dropless", "renormalise": False, "experts_per_token": 3},
    {"router": "switch", "capacity_factor": 9.0},
    {"router": "top2", "capacity_factor": 9.0},
    {"router": "noisy-topk"},
]


@COMPUTE
@pytest.mark.parametrize("fields", ROUTED, ids=str)
def test_a_block_with_experts_keeps_what_is_predicted(compute, fields):
    run = run_of(model=replace(MODEL, experts=5, ffn=48, **fields), compute=compute)
    sizes = unit_bytes(run)[1]
    assert saved(run, 1) == sizes.kept_all
    assert outlived(run, 1) == sizes.kept_all
    selectively = outlived(run, 1, is_selective=True)
    # Of top2 some second choices are not taken, and their rows not computed.
    assert sizes.kept_selective * (0.95 if fields["router"] == "top2" else 1) <= selectively <= sizes.kept_selective


@COMPUTE
@QK_NORM
@SPLIT
def test_a_tensor_parallel_block_keeps_what_is_predicted(pair, compute, qk_norm, sequence_parallel):
    model = replace(MODEL, qk_norm=qk_norm)
    run = run_of(model=model, compute=compute, tp=2, sequence_parallel=sequence_parallel)
    sizes = unit_bytes(run)[1]
    assert saved(run, 1, group=pair) == sizes.kept_all
    assert outlived(run, 1, group=pair, is_selective=True) == sizes.kept_selective


@COMPUTE
@SPLIT
def test_what_the_rules_leave_whole_keeps_what_is_predicted(pair, compute, sequence_parallel):
    run = run_of(compute=compute, tp=2, sequence_parallel=sequence_parallel, rules=FFN + VOCAB)
    embed, block, _, head = unit_bytes(run)
    assert saved(run, 0, group=pair) == embed.kept_all
    assert saved(run, 1, group=pair) == block.kept_all
    assert outlived(run, 1, group=pair, is_selective=True) == block.kept_selective
    assert saved(run, 3, group=pair) == head.kept_all


@COMPUTE
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_fused_head_keeps_what_is_predicted(compute, zero, tied):
    run = run_of(model=replace(MODEL, tied=tied), compute=compute, dp=2, zero=zero)
    assert saved(run, 3) == unit_bytes(run)[3].kept_all


@COMPUTE
@SPLIT
def test_a_tensor_parallel_head_keeps_what_is_predicted(pair, compute, sequence_parallel):
    run = run_of(compute=compute, tp=2, sequence_parallel=sequence_parallel)
    assert saved(run, 3, group=pair) == unit_bytes(run)[3].kept_all


def test_an_embedding_keeps_its_tokens():
    run = run_of()
    assert saved(run, 0) == unit_bytes(run)[0].kept_all


def test_a_tensor_parallel_embedding_keeps_its_own_tokens_and_a_mask(pair):
    run = run_of(tp=2)
    sizes = unit_bytes(run)[0]
    assert saved(run, 0, group=pair) + sizes.kept_input == sizes.kept_all


HALVES = pytest.mark.parametrize("is_selective", [False, True], ids=["all", "selective"])


@COMPUTE
@QK_NORM
@HALVES
def test_between_the_halves_of_its_backward_a_block_keeps_what_is_predicted(compute, qk_norm, is_selective):
    run = run_of(model=replace(MODEL, qk_norm=qk_norm), compute=compute)
    sizes = unit_bytes(run)[1]
    assert between(run, 1, is_selective=is_selective) == sizes.product_inputs + sizes.product_gradients


@COMPUTE
@pytest.mark.parametrize("fields", ROUTED, ids=str)
def test_between_the_halves_a_block_with_experts_keeps_what_is_predicted(compute, fields):
    run = run_of(model=replace(MODEL, experts=5, ffn=48, **fields), compute=compute)
    sizes = unit_bytes(run)[1]
    kept = between(run, 1)
    predicted = sizes.product_inputs + sizes.product_gradients
    assert predicted * (0.9 if fields["router"] == "top2" else 1) <= kept <= predicted


@COMPUTE
@SPLIT
def test_between_the_halves_a_tensor_parallel_block_keeps_what_is_predicted(pair, compute, sequence_parallel):
    run = run_of(compute=compute, tp=2, sequence_parallel=sequence_parallel)
    sizes = unit_bytes(run)[1]
    assert between(run, 1, group=pair) == sizes.product_inputs + sizes.product_gradients


@COMPUTE
@pytest.mark.parametrize("zero", [1, 2])
def test_between_the_halves_a_fused_head_keeps_the_gradients_that_it_made(compute, zero):
    run = run_of(compute=compute, dp=2, zero=zero)
    sizes = unit_bytes(run)[3]
    assert between(run, 3) == sizes.product_inputs + sizes.product_gradients


@COMPUTE
@SPLIT
def test_between_the_halves_the_ends_of_a_tensor_parallel_model_keep_what_is_predicted(
    pair, compute, sequence_parallel
):
    run = run_of(compute=compute, tp=2, sequence_parallel=sequence_parallel)
    for unit in (0, 3):
        sizes = unit_bytes(run)[unit]
        assert between(run, unit, group=pair) == sizes.product_inputs + sizes.product_gradients


def test_between_the_halves_an_embedding_keeps_its_tokens_and_a_gradient():
    run = run_of()
    sizes = unit_bytes(run)[0]
    assert between(run, 0) == sizes.product_inputs + sizes.product_gradients


def test_the_input_is_what_passes_between_units():
    for run in (run_of(), run_of(tp=2), run_of(tp=2, sequence_parallel=False), run_of(compute="bf16")):
        tokens = 64 // (run.plan.mesh.tp if run.plan.sequence_parallel else 1)
        element = DTYPES[run.config.numerics.compute].itemsize
        for sizes in unit_bytes(run)[1:]:
            assert sizes.kept_input == sizes.boundary == tokens * run.shape.width * element
