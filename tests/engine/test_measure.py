"""superstep measure: what is measured can be written, read, and priced; and the arithmetic of prices."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.cost.program.time.op_prices import LIKE, MeasuredMachine, nearby, seconds
from superstep.cost.program.time.operation import (
    AttentionOperation,
    CollectiveOperation,
    MatmulOperation,
    MemoryOperation,
)
from superstep.cost.program.time.predict import predict
from superstep.engine.measure import probe_kernels
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_collectives import line
from superstep.engine.measure.probe_kernels import TimingOptions, measure_operations
from superstep.engine.tracing.trace_units import operations_of
from superstep.errors import ConfigError
from superstep.hardware.chip import CopyRate, ProductRate
from superstep.hardware.cluster import CollectiveRate
from superstep.hardware.cluster_file import cluster
from superstep.kernels import cpu_library
from superstep.model.axes import units
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

USUAL = cluster("8xH100")


def machine(*, cores=2, launch_s=1e-6, products=None, collectives=()):
    chip = replace(
        USUAL.chip,
        cores=cores,
        launch_s=launch_s,
        products=products or (ProductRate(rate="fp32", rows=64, width=64, inner=64, flops_per_s=1e9),),
        copies=(
            CopyRate(bytes=1000, bytes_per_s=1e9),
            CopyRate(bytes=100_000, bytes_per_s=1e10),
        ),
    )
    return MeasuredMachine(cluster=replace(USUAL, chip=chip, collectives=collectives), rate="fp32", is_host=True)


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), min_size=1, max_size=6, unique=True),
    st.integers(1, 4096),
)
def test_between_shapes_a_rate_lies_between_the_rates_known(shapes, rows):
    known = [((a, b, 64), 1e9 * (place + 1)) for place, (a, b) in enumerate(shapes)]
    assert min(r for _, r in known) * 0.999 <= nearby(known, (rows, 7, 64)) <= max(r for _, r in known) * 1.001
    for shape, rate in known:
        assert nearby(known, shape) == rate


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_the_line_through_exact_points_is_found(latency_s, rate):
    points = [(size, latency_s + size / rate) for size in (2**12, 2**16, 2**21)]
    found_s, found = line(points)
    for size, taken_s in points:
        assert found_s + size / found == pytest.approx(taken_s, rel=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4))
def test_no_line_has_a_negative_latency_or_rate(taken):
    latency_s, rate = line(list(zip((2**12, 2**16, 2**19, 2**21), taken, strict=True)))
    assert latency_s >= 0
    assert 0 < rate < math.inf


def test_a_pass_is_on_the_line_between_sizes_and_no_faster_than_the_smallest():
    found = machine()
    assert found.pass_s("copy", 10) == pytest.approx(1e-6)
    assert found.pass_s("copy", 50_500) == pytest.approx((1e-6 + 1e-5) / 2)
    assert found.pass_s("copy", 200_000) == pytest.approx(2e-5)
    assert found.pass_s("view", 0) == 1e-6
    # Python of its own comes on top of every kernel.
    assert machine(launch_s=5e-6).pass_s("copy", 10) == pytest.approx(5e-6)


def test_without_a_mask_attention_takes_twice_as_long():
    found, causal = machine(), AttentionOperation(heads=2, queries=64, keys=64, head_dim=64)
    assert found.attention_s(replace(causal, is_causal=False)) == pytest.approx(2 * found.attention_s(causal))


def test_operations_add_up():
    rate = CollectiveRate(name="send", ranks=2, latency_s=1e-3, bytes_per_s=1e6)
    found = machine(collectives=(rate,))
    product, move = (
        MatmulOperation(rows=64, width=64, inner=64, count=3),
        MemoryOperation(kernel="copy", bytes=1000, count=2),
    )
    message = CollectiveOperation(collective="send", axis="cp", bytes=1000)
    expected = 3 * found.product_s(product) + 2 * found.pass_s("copy", 1000) + 1e-3 + 1e-3
    assert seconds((product, move, message), found, lambda axis: 2) == pytest.approx(expected)
    assert found.collective_s("send", 1e9, 1) == 0.0


def test_gradients_of_weights_have_rates_of_their_own(small_measure):
    """They are found in a unit, measured as they are made, and priced by that."""
    run = resolve(RunConfig(model=ModelConfig(name="tiny"), plan=PlanConfig(dp=1, microbatch=4)))
    block = operations_of(run, units(run.shape))[1]
    shapes = {
        (way, kernel): Counter(
            tuple(sorted((o.rows, o.width, o.inner))) for o in operations for _ in range(o.count) if _is(o, kernel)
        )
        for way, operations in (("forward", block.forward), ("backward", block.backward), ("weight", block.weight))
        for kernel in ("product", "gradient")
    }
    assert not shapes["forward", "gradient"]
    assert not shapes["weight", "product"]
    # Each product of the forward pass has both gradients in the backward pass.
    assert shapes["backward", "gradient"] == shapes["weight", "gradient"] == shapes["forward", "product"]
    assert shapes["backward", "product"] == shapes["forward", "product"]
    rates, _ = measure_operations(block.backward, "fp32", TimingOptions(device=Device("cpu"), budget_s=0.0))
    assert {rate.kernel for rate in rates} >= {"product", "gradient"}
    of_gradients = ProductRate(kernel="gradient", rate="fp32", rows=64, width=64, inner=64, flops_per_s=1e3)
    found = machine()
    chip = replace(found.cluster.chip, products=(*found.cluster.chip.products, of_gradients))
    slow = replace(found, cluster=replace(found.cluster, chip=chip))
    product = MatmulOperation(rows=64, width=64, inner=64)
    gradient = replace(product, kernel="gradient")
    assert slow.product_s(gradient) > 10 * slow.product_s(product)
    assert found.product_s(gradient) == found.product_s(product), "where none was measured"


def _is(operation, kernel):
    return isinstance(operation, MatmulOperation) and operation.kernel == kernel


def test_more_ranks_than_cores_take_all_their_work_over_the_cores():
    def step_s(cores):
        return predict(run, machine(cores=cores), operations_of(run, units(run.shape))).step_s

    config = RunConfig(
        model=ModelConfig(name="tiny"), train=TrainConfig(batch_sequences=8), plan=PlanConfig(dp=4, microbatch=2)
    )
    run = resolve(config)
    assert step_s(1) == pytest.approx(4 * step_s(4), rel=0.2)
    assert step_s(2) == pytest.approx(step_s(1) / 2)
    assert step_s(64) == pytest.approx(step_s(8))


def test_a_format_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="no product was measured in bf16; superstep measure writes"):
        replace(machine(), rate="bf16")


def test_ranks_need_be_no_power_of_two(capsys):
    assert main(["measure", "--quick", "--ranks", "3", "--model", "tiny"]) == 0
    assert "3 ranks" in capsys.readouterr().out


def test_measure_writes_a_file_that_predicts_and_draws_a_roofline(tmp_path, capsys):
    out, plot = tmp_path / "here.toml", tmp_path / "roof.svg"
    command = ["measure", "--quick", "--ranks", "1", "--model", "tiny", "--out", str(out), "--plot", str(plot)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "fastest product" in said
    for unit in ("embedding", "block forward", "block backward", "attention", "head", "optimizer"):
        assert unit in said
        assert unit == "embedding" or unit in plot.read_text(encoding="utf-8")
    found = MeasuredMachine(cluster=cluster(str(out)), rate="fp32", is_host=True)
    assert found.gemm_flops_per_s > 1e8
    run = resolve(RunConfig(model=ModelConfig(name="tiny"), plan=PlanConfig(dp=1, microbatch=4)))
    assert 1e-4 < predict(run, found, operations_of(run, units(run.shape))).step_s < 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "-1"], "--ranks = -1 must be at least 1"),
        (["--ranks", "0"], "--ranks = 0 must be at least 1"),
        (["--model", "demoo"], "did you mean"),
        (["--wrong"], "unknown flag --wrong; superstep measure --help lists them."),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, words, capsys):
    assert main(["measure", *flags]) == 2
    assert words in capsys.readouterr().err


CPU = Device("cpu")
KERNELS = TimingOptions(device=CPU, budget_s=0.0, is_compiled=True)


@pytest.fixture
def little(small_measure, monkeypatch):
    """Every call takes a second, and each sweep 1000 more, which no gauge is to count."""
    now, swept = [0.0], []

    def sweep(self):
        swept.append(now[0])
        now[0] += 1000

    monkeypatch.setattr(probe_kernels.CacheFlusher, "__call__", sweep)
    return now, swept


def ticking(gauge, now, monkeypatch):
    """The gauge with that clock, on which work takes a second."""

    def once(self, work, times):
        start_s = self.clock()
        work()
        now[0] += times
        return self.clock() - start_s

    monkeypatch.setattr(TimingOptions, "_once", once)
    return replace(gauge, clock=lambda: now[0])


def test_caches_are_swept_before_every_run_and_no_sweep_counts(little, monkeypatch):
    now, swept = little
    gauge = ticking(KERNELS, now, monkeypatch)
    assert gauge.seconds(lambda: None) == 1.0
    assert len(swept) == 3
    swept.clear()
    # The layers of a block sweep in its midst: seven linears, four other layers, and a product for each gradient.
    operations = 1 / launch_s(gauge)
    assert operations == pytest.approx(round(operations))
    assert 100 < operations < 200
    assert len(swept) > 3 * 14


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("keys", [64, 128], ids=["causal", "without a mask"])
def test_attention_is_priced_at_what_it_was_measured_at(little, monkeypatch, keys, is_backward):
    """In a ring a block of keys that all queries see is measured without a mask, and has none in its price."""
    gauge = ticking(KERNELS, little[0], monkeypatch)
    block = AttentionOperation(
        heads=4, queries=64, keys=keys, head_dim=32, is_backward=is_backward, is_causal=keys == 64
    )
    rates, _ = measure_operations((block,), "fp32", gauge)
    assert machine(products=(*machine().cluster.chip.products, *rates)).attention_s(block) == pytest.approx(1.0, 1e-3)


def test_kernels_of_our_own_are_seen_measured_and_priced_as_such(small_measure):
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)
    run = resolve(RunConfig(model=ModelConfig(name="tiny"), plan=PlanConfig(dp=1, microbatch=4)))
    seen = operations_of(run, units(run.shape))
    found = {o.kernel for unit in seen for o in (*unit.forward, *unit.backward) if isinstance(o, MemoryOperation)}
    assert set(LIKE) <= found
    _, copies = measure_operations([MemoryOperation(kernel=kernel, bytes=0) for kernel in LIKE], "fp32", KERNELS)
    assert set(LIKE) <= {copy.kernel for copy in copies}
    usual = machine()
    for kernel in LIKE:
        assert usual.pass_s(kernel, 1e5) == usual.pass_s("copy", 1e5), "where neither was measured"
        slow = CopyRate(kernel=kernel, bytes=1000, bytes_per_s=1.0)
        like = CopyRate(kernel=LIKE[kernel], bytes=1, bytes_per_s=1e-3)
        chip = usual.cluster.chip
        own, others = (
            replace(usual, cluster=replace(usual.cluster, chip=replace(chip, copies=(*chip.copies, *more))))
            for more in ((slow, like), (like,))
        )
        assert own.pass_s(kernel, 1000) == pytest.approx(1000)
        assert others.pass_s(kernel, 1000) == others.pass_s(LIKE[kernel], 1000)


def test_many_narrow_products_at_once_have_a_rate_of_their_own(little, monkeypatch):
    """What a token's experts gave is summed by products of two rows, one for each token."""
    moe = ModelConfig(name="tiny", experts=4, experts_per_token=2, router="dropless")
    run = resolve(RunConfig(model=moe, plan=PlanConfig(dp=1, microbatch=4)))
    block = operations_of(run, units(run.shape))[1]
    tokens = 4 * run.config.data.sequence_tokens
    batches = [o for o in (*block.forward, *block.backward) if isinstance(o, MatmulOperation) and o.kernel == "batch"]
    assert len(batches) >= 3
    assert {o.batch for o in batches} == {tokens}
    usual = machine()
    assert usual.product_s(batches[0]) == usual.pass_s("read", 4 * batches[0].numel), "where none was measured"
    rates, _ = measure_operations(batches, "fp32", ticking(KERNELS, little[0], monkeypatch))
    chip = replace(usual.cluster.chip, products=(*usual.cluster.chip.products, *rates))
    own = replace(usual, cluster=replace(usual.cluster, chip=chip))
    for batch in batches:
        assert own.product_s(batch) == pytest.approx(1.0, 1e-3)
