"""Dropout by place: one process's numbers on every layout, in a model of one's own and in the decoder."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine import build
from superstep.engine.engine import Engine
from superstep.engine.parallel.noise import find_place
from superstep.engine.tracing.trace_units import layers_of, operations_of
from superstep.engine.values.microbatch import microbatches_of, rows_at
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.decoder import Decoder
from superstep.model.unit import UnitGraph
from superstep.numerics.noise import hold_whole
from superstep.plan.config import ModelConfig, PlanConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof import stream
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.weights.model import resolve_config, units_of

SOURCE = Path(__file__).parents[2] / "recipes" / "own_model.py"
RULES = (("attention", "tp"), ("hidden", "tp"), ("words", "tp"))
CPU = Device("cpu")

DROPS = {
    "self.out(attend(q_BSNH, k_BSNH, v_BSNH)": "self.out(self.drop(attend(q_BSNH, k_BSNH, v_BSNH))",
    "self.out = nn.Linear(width, width)": "self.out = nn.Linear(width, width)\n        self.drop = nn.Dropout(0.2)",
    "self.down = nn.Linear(4 * width, width)": (
        "self.down = nn.Linear(4 * width, width)\n        self.drop, self.paths = nn.Dropout(0.3), 0.25"
    ),
    "def forward(self, x_BSD: Tensor) -> Tensor:\n        out_BSD: Tensor = self.down(F.gelu(self.up(x_BSD)))": (
        "def forward(self, x_BSD: Tensor, noise) -> Tensor:\n"
        "        out_BSD = self.down(self.drop(F.gelu(self.up(x_BSD))))\n"
        "        out_BSD = out_BSD + 0.1 * noise.normal('jitter', out_BSD) * noise.uniform('size', out_BSD)\n"
        "        out_BSD = noise.dropout('path', out_BSD, self.paths, dims=1)"
    ),
    "attend: Attend = flash) -> Tensor:": "attend: Attend = flash, noise=None) -> Tensor:",
    "self.mlp(self.norm_2(h_BSD))": "self.mlp(self.norm_2(h_BSD), noise)",
    'takes=("attend",)': 'takes=("attend", "noise")',
}
"""The recipe's residual dropout, and: dropout of heads and of hidden numbers, which tp cuts; drop path; noise."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in DROPS.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("model") / "drops.py"
    path.write_text(text, encoding="utf-8")
    return path


def own(source, *, dropout=0.2, **plan):
    model = ModelConfig(source=str(source), layers=2, width=32, heads=4, vocab=small.VOCAB, dropout=dropout)
    return replace(small.config(packed=False), model=model, plan=PlanConfig(**({"rules": RULES} | plan)))


def decoder(**plan):
    found = small.config(layers=2, packed=False, **({"microbatch": 2} | plan))
    return exactly(replace(found, model=replace(found.model, dropout=0.2)), chunks=4)


def exactly(config, *, chunks=None):
    numerics = replace(config.numerics, exact=True, exact_chunks=chunks)
    return replace(config, data=replace(config.data, sequence_tokens=32), numerics=numerics)


LAYOUTS = {
    2: [
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"cp": 2, "microbatch": 4},
        {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
        {"dp": 2, "zero": 3, "recompute": "full", "microbatch": 1},
    ],
    4: [{"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "microbatch": 2}],
}
EXACT_LAYOUTS = {
    2: [{"tp": 2, "recompute": "selective"}, {"cp": 2, "recompute": "full"}, {"dp": 2, "zero": 3}],
    4: [{"tp": 2, "cp": 2}, {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}],
}


def _seed_per_rank(module=build):
    def place(run, mesh, *others):
        return replace(find_place(run, mesh, *others), seed=mesh.rank)

    return mock.patch.object(module, "find_place", place)


def _rows_of_each_rank():
    def place(run, mesh, step, count, first):
        return find_place(run, mesh, step, count, first % (small.SEQUENCES // 2))

    return mock.patch.object(build, "find_place", place)


def _part_from_the_start():
    return mock.patch.object(build, "find_held", return_value=hold_whole)


FAULTS = {
    "a seed per rank": (_seed_per_rank, {"tp": 2, "sequence_parallel": False}),
    "samples counted on each rank": (_rows_of_each_rank, {"dp": 2}),
    "parts counted from the start": (_part_from_the_start, {"tp": 2}),
}


def _prove(rank, world, cases, folder, fault=None):
    with FAULTS[fault][0]() if fault else mock.MagicMock():
        return [
            prove(World(rank, world, CPU), run, small.batches(packed=False), Path(folder), reruns=False)
            for run in cases
        ]


def _exact_batches():
    return small.batches(packed=False, tokens=32)


def _write(rank, world, run, folder):
    return write_bits(World(rank, world, CPU), run, _exact_batches(), Path(folder), stop=1)


def _prove_exact(rank, world, cases, folder, fault=None):
    relay = Relay(take=Path(folder) / "checkpoint", leave=None, step=1)
    with FAULTS[fault][0]() if fault else mock.MagicMock():
        return [prove_exact(World(rank, world, CPU), run, _exact_batches(), Path(folder), relay) for run in cases]


@pytest.fixture(scope="module")
def reference(source, tmp_path_factory):
    folder, run = tmp_path_factory.mktemp("reference"), resolve_config(own(source, dp=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_reference(units_of(run), run.config.train, small.batches(packed=False), folder)
    torch.set_num_threads(threads)
    return str(folder)


@pytest.mark.multiproc
@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3, "recompute": "full"}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_every_layout_of_ones_own_model_has_the_same_bits(pool, source, tmp_path, plan):
    """From the start, and from the checkpoint of one rank."""
    alone, run = (resolve_config(exactly(own(source, rules=(), microbatch=2, **how))) for how in ({"dp": 1}, plan))
    pool.run(1, _write, alone, str(tmp_path))
    (verdict,) = pool.run(2, _prove_exact, [run], str(tmp_path), timeout_s=60)[0]
    assert verdict.is_proven, [d.describe() for d in (verdict.first, verdict.first_resumed) if d]


@pytest.fixture(scope="module")
def bits(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bits"))
    pool.run(1, _write, resolve(decoder()), folder)
    return folder


@pytest.mark.multiproc
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_drops_what_one_process_does(pool, source, reference, world):
    cases = [resolve_config(own(source, **plan)) for plan in LAYOUTS[world]]
    verdicts = pool.run(world, _prove, cases, reference, timeout_s=120)[0]
    for run, verdict in zip(cases, verdicts, strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())


@pytest.mark.multiproc
@pytest.mark.parametrize("world", EXACT_LAYOUTS)
def test_every_layout_of_the_decoder_has_the_same_bits(pool, bits, world):
    """From the start, and from the checkpoint of one rank."""
    cases = [resolve(decoder(**plan)) for plan in EXACT_LAYOUTS[world]]
    verdicts = pool.run(world, _prove_exact, cases, bits, timeout_s=120)[0]
    for run, verdict in zip(cases, verdicts, strict=True):
        assert verdict.is_proven, (run.config.plan, [d.describe() for d in (verdict.first, verdict.first_resumed) if d])


@pytest.mark.multiproc
@pytest.mark.parametrize("fault", FAULTS)
def test_numbers_of_a_rank_are_seen(pool, source, reference, bits, fault):
    plan = FAULTS[fault][1]
    (close,) = pool.run(2, _prove, [resolve_config(own(source, **plan))], reference, fault, timeout_s=60)[0]
    assert not close.is_proven
    (exact,) = pool.run(2, _prove_exact, [resolve(decoder(**plan))], bits, fault, timeout_s=60)[0]
    assert exact.first is not None
    assert exact.first_resumed is not None


def _noise_faults(rank, world, run, is_planted):
    mesh = build_mesh(run.plan, rank, CPU, timeout=timedelta(seconds=60))
    with _seed_per_rank(stream) if is_planted else mock.MagicMock():
        found = stream.noise_fault(run, mesh)
    mesh.destroy()
    return found


@pytest.mark.multiproc
def test_prove_names_a_seed_per_rank(pool):
    run = resolve(decoder(dp=2))
    assert pool.run(2, _noise_faults, run, False) == ["", ""]
    named = "random numbers of rank 1, microbatch 0: the seed is 1, not 0"
    assert pool.run(2, _noise_faults, run, True) == ["", named]


def test_a_decoder_in_use_drops_nothing():
    shape = resolve(decoder()).shape
    assert shape.dropout == 0.2
    tokens = torch.arange(10)[None]
    model = Decoder(shape).eval()
    assert torch.equal(model(tokens), model(tokens))


def test_units_in_use_drop_nothing(source):
    run = resolve_config(own(source, dp=1))
    model, tokens = UnitGraph(units_of(run), 0), torch.arange(small.TOKENS)[None]
    assert torch.equal(model(tokens), model(tokens))
    plain = resolve_config(own(SOURCE, dp=1)), resolve_config(own(SOURCE, dropout=0.0, dp=1))
    with_and_without = [UnitGraph(units_of(run), 0)(tokens) for run in plain]
    assert torch.equal(*with_and_without)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_no_mask_is_kept_and_memory_is_predicted(recompute):
    """Dropout adds its output to a block, and keeps nothing that the sum after it does not."""

    def kept_bytes(dropout):
        run = resolve(replace(decoder(recompute=recompute), model=replace(decoder().model, dropout=dropout)))
        return operations_of(run, units_of(run))[1].kept_bytes

    assert kept_bytes(0.0) <= kept_bytes(0.2) <= kept_bytes(0.0) + 100


def test_the_table_of_layers_has_dropout(source):
    run = resolve_config(own(source, dp=1))
    (choices,) = [layers for unit, layers in layers_of(run, units_of(run), CPU).items() if unit == 1]
    drops = {choice.path: [row.name for row in choice.chosen] for choice in choices if choice.layer == "Dropout"}
    assert drops == {path: ["dropout by place"] for path in ("attention.drop", "mlp.drop", "dropout")}


def test_a_compiled_model_drops_outside_of_compiled_code():
    run = resolve(replace(small.config(layers=2), numerics=replace(small.config().numerics, compile=True)))
    run = replace(run, decoder=replace(run.shape, dropout=0.2))
    (choices,) = [layers for unit, layers in layers_of(run, units_of(run), CPU).items() if unit == 1]
    names = [[row.name for row in choice.chosen] for choice in choices if choice.layer == "Dropout"]
    assert names == [["dropout by place", "outside torch.compile"]]


def _gradients(rank, world, run):
    """Of the rows of this rank's place, and of the next one's: as the recheck of a gradient computes both."""
    mesh, (batch, _) = build_mesh(run.plan, rank, CPU, timeout=timedelta(seconds=60)), _exact_batches()
    engine, found = Engine(run, units_of(run), mesh), []

    def refuse(*_):
        found.append([piece.values.clone() for piece in engine.pieces(["gradient"])])
        return "computed again"

    for place in (rank, (rank + 1) % world):
        parts = microbatches_of(batch.rows(rows_at(run.plan, place)), run.plan, mesh, place)
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=0.0, judge=refuse)
    mesh.destroy()
    mine, others = found
    return all(torch.equal(*both) for both in zip(mine, others, strict=True))


@pytest.mark.multiproc
def test_rows_have_their_numbers_on_whichever_rank_computes_them(pool):
    assert pool.run(2, _gradients, resolve(decoder(dp=2)), timeout_s=60) == [True, True]


def _losses(rank, world, runs):
    found = []
    for run in runs:
        mesh = build_mesh(run.plan, rank, CPU, timeout=timedelta(seconds=60))
        engine = Engine(run, units_of(run), mesh)
        for batch in small.batches(packed=False):
            steps = microbatches_of(batch, run.plan, mesh)
            found.append(engine.train_step(steps, valid_tokens=batch.valid_tokens, lr=1e-3).loss)
        mesh.destroy()
    return found


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_compiled_model_drops_the_same(pool):
    config = small.config(layers=2, packed=False, microbatch=8)
    config = replace(config, model=replace(config.model, dropout=0.2))
    compiled = replace(config, numerics=replace(config.numerics, compile=True))
    ((eager, second, *others),) = pool.run(1, _losses, [resolve(config), resolve(compiled)], timeout_s=300)
    assert others == pytest.approx([eager, second], rel=1e-5)


def test_a_compiled_unit_that_takes_noise_is_refused(source):
    config = own(source, dp=1)
    config = replace(config, numerics=replace(config.numerics, compile=True))
    with pytest.raises(ConfigError, match=r"numerics.compile = true: .* unit 'block.0' takes 'noise'"):
        resolve_config(config)
    resolve_config(replace(config, model=replace(config.model, source=str(SOURCE))))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match=re.escape(f"model.dropout = {share} must be at least 0 and below 1")):
        resolve(replace(decoder(), model=replace(decoder().model, dropout=share)))


FLAT = "self.mlp(self.norm_2(h_BSD))", "self.mlp(self.norm_2(h_BSD)).flatten(0, 1)).view(h_BSD.shape"


def test_dropout_of_tokens_in_one_row_is_refused(tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    path = tmp_path / "flat.py"
    path.write_text(text.replace(*FLAT), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve_config(own(path, dp=1))
    assert "unit 'block.0' does not run on an input [1, 16, 32]: 'block.0.dropout#2' draws" in str(caught.value)
    assert "for a tensor [16, 32] in a microbatch of 1 samples; let the samples be its first dim." in str(caught.value)
