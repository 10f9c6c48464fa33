"""Nothing that a GPU is to do is given a tensor of the CPU's."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import small
from elsewhere import Elsewhere, Strict
from longer import longer
from superstep.cost.program.operation import Attention, Pass, Product
from superstep.model import experts
from superstep.model.axes import units
from superstep.numerics.policy import PolicyLoss
from superstep.plan.config import ModelConfig
from superstep.plan.resolve import resolve
from superstep.runtime import engine as engine_module
from superstep.runtime.engine import Engine
from superstep.runtime.measure import kernels, links
from superstep.runtime.measure.kernels import Gauge, measure_operations
from superstep.runtime.measure.launch_cost import launch_s
from superstep.runtime.mesh import build_mesh
from superstep.runtime.optimizer import AdamW
from superstep.train.batches import microbatches

GPU = Elsewhere("cuda", 0)
OPERATIONS = [
    Product(rows=8, width=16, inner=8),
    Attention(heads=2, queries=8, keys=8, head_dim=8),
    Attention(heads=2, queries=8, keys=8, head_dim=8, is_backward=True),
    Attention(heads=2, queries=8, keys=16, head_dim=8),
    *(Pass(kernel=kernel, bytes=0) for kernel in kernels._PASSES),
]


def test_the_watch_refuses_what_a_gpu_refuses():
    x, count = torch.ones(4, device="meta"), torch.ones(())
    with Strict():
        assert (x * count).device.type == "meta"  # a number may come along
        with pytest.raises(AssertionError, match=r"index_select.*\['cpu', 'meta'\]"):
            torch.index_select(x, 0, torch.zeros(2, dtype=torch.long))
        with pytest.raises(AssertionError, match="_fused_adamw_"):
            kernels.torch._fused_adamw_(
                *([[x.clone()] for _ in range(4)]), [], [count],
                lr=0.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_measured_is_on_the_device_that_is_asked(dtype):
    with Strict() as seen:
        products, copies = measure_operations(OPERATIONS, dtype, Gauge(device=GPU, budget_s=0.0))
        launch_s(Gauge(device=GPU, budget_s=0.0))
    assert len(products) == 4
    assert {copy.kernel for copy in copies} == set(kernels._PASSES)
    assert max(copy.bytes for copy in copies) == 2**28, "its rate at 16 MiB is that of launches"
    for name in ("mm", "_fused_adamw_", "silu", "_log_softmax", "index_select", "linalg_vector_norm"):
        assert any(name in operation for operation in seen.operations), name
    assert not seen.strangers


def test_a_gpu_is_timed_over_several_calls_and_a_cpu_over_one():
    """A GPU's kernel of microseconds would drown in the wait for its end; a step does not wait after each either."""
    now = [0.0]

    class Waits(Elsewhere):
        def synchronize(self):
            now[0] += 50e-6

    def work():
        now[0] += 2e-6

    clock = {"clock": lambda: now[0], "budget_s": 0.0}
    assert Gauge(device=Waits("cuda", 0), **clock).seconds(work) < 5e-6
    assert Gauge(device=Waits("cpu"), **clock).seconds(work) == pytest.approx(52e-6)
    assert Gauge(device=Waits("cuda", 0), **clock).seconds(work, calls=2) < 2.5e-6


LAYOUTS = {
    "fp32": {},
    "bf16, recomputed": {"compute": "bf16", "recompute": "full"},
    "kept selectively": {"compute": "bf16", "recompute": "selective"},
    "exact": {},
    "experts": {"compute": "bf16"},
}
MOE = ModelConfig(name="tiny", experts=4, experts_per_token=2, router="noisy-topk")


POLICY = PolicyLoss(correction="mis", kl_coef=0.1, dual_clip=3.0)


def run_of(name):
    config = small.config(layers=2, microbatch=4, **LAYOUTS[name])  # two of each: what one hands on to the next is seen
    if name == "experts":
        config = replace(config, model=MOE)
    return resolve(replace(config, numerics=replace(config.numerics, exact=name == "exact")))


def without_reading(monkeypatch):
    """What a GPU does with experts, and what takes numbers back to the CPU left out."""
    monkeypatch.setattr(engine_module, "require_exact", lambda *args: None)
    monkeypatch.setattr(
        AdamW, "sums", lambda self, told, excess, flags=(): (1.0, [1.0] * len(told), [False] * len(flags))
    )
    monkeypatch.setattr(experts, "is_grouped", lambda *factors: True)


@pytest.mark.parametrize("name", longer(LAYOUTS, lambda name: name in ("fp32", "bf16, recomputed")))
def test_a_step_gives_a_gpu_nothing_of_the_cpus(name, monkeypatch):
    without_reading(monkeypatch)
    run = run_of(name)
    mesh = build_mesh(run.plan, 0, GPU, timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    (batch,) = small.batches(steps=1)
    mine = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh)
    streams = {name: torch.ones(batch.targets_BS.shape) for name in (*POLICY.reads, "weights")}
    weighed = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh, streams=streams)
    with Strict() as seen:
        for _ in range(2):
            engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
        engine.train_step(weighed, valid_tokens=batch.valid_tokens, lr=1e-3)
        engine.train_step(weighed, valid_tokens=batch.valid_tokens, lr=1e-3, objective=POLICY)
        engine.logprobs(mine)
    assert len(seen.operations) > 1000
    assert any("_fused_adamw_" in operation for operation in seen.operations) is (name != "exact")
    # Fast mode waits for its GPU but at the end of a step, which is left out here; the fixed point of exact mode does.
    assert (seen.reads == 0) is (name != "exact")
    # The one thing that is computed here and sent there: noise, which has the same bits on every device.
    drawn = {"aten.empty.memory_format", "aten.normal_.default", "aten.stack.default"} if name == "experts" else set()
    assert set(seen.strangers) == drawn
    assert seen.waits == [] or name == "exact"


def test_a_collective_is_timed_without_the_compute_before_it(monkeypatch):
    """A GPU has only been told of that when the clock is read."""
    now, queued = [0.0], [0.0]

    class Waits(Elsewhere):
        def synchronize(self):
            now[0] += queued[0]
            queued[0] = 0.0

    class Two:
        def size(self):
            return 2

    def queue(seconds):
        queued[0] += seconds

    monkeypatch.setattr(links.torch, "mm", lambda *args: queue(1.0))
    monkeypatch.setattr(links, "barrier", lambda device, group: None)
    monkeypatch.setattr(links, "gather", lambda value: [value])
    monkeypatch.setattr(links, "_work", lambda name, buffer, group: lambda: queue(1e-3 + buffer.nbytes * 1e-9))
    rate = links._rate("all-reduce", Two(), Gauge(device=Waits("cuda", 0), clock=lambda: now[0]))
    assert (rate.latency_s, rate.bytes_per_s) == pytest.approx((1e-3, 1e9))
