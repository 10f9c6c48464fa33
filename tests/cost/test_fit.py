"""Plans that do not fit: what overflows is named, and every mend that is offered would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import runs
import small
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.cost.program.memory import temporaries
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory_fit import by_category, memory_of, overflow, with_communicators
from superstep.cost.program.memory.temporaries import head_workspace
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Backward
from superstep.program.peak_memory import course
from superstep.run.memory_check import require_fit
from superstep.train.weights.model import operations


def block_workspace(run):
    return temporaries.block_workspace(run, run.decoder.mixer(0))


def run_of(**layout):
    return resolve(small.config(**{"layers": 6, "microbatch": 8, "dp": 2, "sequences": 16} | layout))


def fullest(run):
    return max(memory_of(run), key=lambda rank: rank.bytes)


def test_a_plan_that_fits_is_let_through_to_the_byte():
    run = run_of()
    need = fullest(run).bytes
    assert overflow(run.config, lambda config: memory_of(resolve(config)), need) is None
    assert overflow(run.config, lambda config: memory_of(resolve(config)), need - 1) is not None


def test_every_mend_fits_and_is_the_mildest_of_its_kind():
    run = run_of()
    limit = fullest(run).bytes * 3 // 4
    found = overflow(run.config, lambda config: memory_of(resolve(config)), limit)
    assert found is not None
    assert {mend.field for mend in found.mends} >= {"plan.recompute", "plan.microbatch"}
    for mend in found.mends:
        name = mend.field.removeprefix("plan.")
        changed = resolve(replace(run.config, plan=replace(run.config.plan, **{name: mend.value})))
        assert fullest(changed).bytes == mend.bytes <= limit
        if name == "microbatch":
            larger = [m for m in (4, 2, 1) if m > mend.value]
            for size in larger:
                other = resolve(replace(run.config, plan=replace(run.config.plan, microbatch=size)))
                assert fullest(other).bytes > limit


@pytest.mark.parametrize(
    ("share", "category"),
    [(0.01, "parameters"), (0.3, "activations")],
)
def test_the_first_category_without_room_is_named(share, category):
    run = run_of(zero=0)
    parts = by_category(fullest(run))
    assert sum(parts.values()) == fullest(run).bytes
    stays = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    limit = int(share * parts["parameters"]) if category == "parameters" else stays + 1
    found = overflow(run.config, lambda config: memory_of(resolve(config)), limit)
    assert found is not None
    assert found.category == category


def test_the_refusal_is_one_line_with_the_mend():
    run = run_of()
    limit = fullest(run).bytes * 3 // 4
    with pytest.raises(ConfigError, match=r"its activations do not fit; set plan\.\w+ to") as caught:
        require_fit(run, Device("cpu"), operations(run), limit_bytes=limit)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="use more ranks or a smaller model"):
        require_fit(run, Device("cpu"), operations(run), limit_bytes=1000)
    require_fit(run, Device("cpu"), operations(run))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whole_scores_of_exact_attention_are_counted(device):
    """Where torch makes them, and refused by the same rule; kernels make none."""
    run = resolve(small.config(layers=1, exact=True, microbatch=2))
    assert run.kept.exact_scores
    ways, chunks, keys = 4, run.plan.grain.chunks, 256
    tokens = run.config.data.sequence_tokens
    assert tokens <= keys
    scores = ways * run.plan.microbatch * run.decoder.heads * (tokens // chunks) * keys * 4
    assert block_workspace(run) == (0, scores)
    (rank,) = memory_of(run)
    need = rank.bytes + (with_communicators([rank], run.plan)[0].communicators if device == "cuda" else 0)
    assert by_category(rank)["workspace"] == scores
    there = Device(device)
    require_fit(run, there, operations(run), limit_bytes=need)
    with pytest.raises(ConfigError, match=r"workspace .* and its workspace do not fit"):
        require_fit(run, there, operations(run), limit_bytes=need - 1)
    assert block_workspace(replace(run, kept=replace(run.kept, exact_scores=False)))[1] < scores


def test_what_a_head_makes_is_counted_where_it_is_and_nowhere_else():
    """On the last stage, at the head; blocks that are computed again have their own peak, which does not add up."""
    first, last = memory_of(resolve(small.config(layers=2, pp=2, microbatch=1)))
    assert last.peak.workspace_bytes == head_workspace(run_of(pp=2, layers=2, microbatch=1, dp=1))[0]
    assert first.peak.workspace_bytes == block_workspace(run_of(pp=2, layers=2, microbatch=1, dp=1))[1]


def test_what_selective_recomputation_makes_again_is_counted():
    run = run_of(recompute="selective", microbatch=1)
    program, sizes = compile_step(run.plan), unit_bytes(run)
    again = sizes[1].kept_all - sizes[1].kept_selective
    backward = [
        level.workspace_bytes
        for i, level in zip(program.ranks[0], course(program, 0, sizes), strict=True)
        if isinstance(i, Backward) and i.unit == 1
    ]
    assert set(backward) == {again + block_workspace(run)[1]}
    assert again > 0


def test_train_refuses_before_it_writes_anything(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Device, "free_bytes", lambda self, ranks: 1000)
    assert main(["train", "run.toml"]) == 2
    assert "a rank has 1000 B, and its parameters do not fit" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
