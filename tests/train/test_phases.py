"""Steps of two phases under every layout: a discriminator, then a generator through the frozen discriminator."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longer import many_ranks
from superstep.comm.device import Device
from superstep.cost.program.time.operation import MatmulOperation, UnitOperations
from superstep.data.batch import Batch
from superstep.engine import build
from superstep.engine.engine import Engine
from superstep.engine.parallel.noise import find_place
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitGraph, weigh_losses
from superstep.plan.config import (
    FreezeConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.plan.config_io import parse_config
from superstep.plan.resolution.phase_settings import train_of_phase
from superstep.plan.resolution.resolve import resolve
from superstep.plan.rollback import RollbackConfig
from superstep.plan.trained_parts import PhasesConfig
from superstep.program.compile import compile_step
from superstep.program.text import describe, read_program, write_program
from superstep.train.proof import prove_tolerance
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.proof.reference import unit_steps
from superstep.train.weights.model import flops_per_token


class Pair(nn.Module):
    """A drawn picture, and a real one."""

    def forward(self, drawn: Tensor, real: Tensor) -> Tensor:
        return torch.stack((drawn, real), 1)


def judge(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the discriminator."""
    return (F.softplus(logits[:, 0]) + F.softplus(-logits[:, 1])).sum()


def fool(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the generator."""
    return F.softplus(-logits[:, 0]).sum()


PHASES = {"judge": (3, 4), "fool": (0, 1)}


def gan(phases=PHASES, losses=None):
    torch.manual_seed(3)
    modules = [
        nn.Sequential(nn.Linear(6, 16, bias=False), BatchNorm(16, 4), nn.GELU()),
        nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (1, 4, 4))),
        Pair(),
        nn.Sequential(nn.Flatten(2), nn.Linear(16, 12), BatchNorm(2, 4), nn.GELU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(12, 1), nn.Flatten()),
    ]
    losses = {"judge": judge, "fool": fool} if losses is None else losses
    return as_units(modules, inputs={0: ["latents"], 2: [1, "pixels"]}, loss=losses, phases=phases)


def batches():
    generator = torch.Generator().manual_seed(5)

    def batch():
        fields = {
            "latents": torch.randn(16, 6, generator=generator),
            "pixels": torch.randn(16, 1, 4, 4, generator=generator),
        }
        return Batch(fields, torch.zeros(16, dtype=torch.long), 16, reads="latents")

    return batch(), batch()


def run_of(*, specs=None, phases=None, **plan):
    config = RunConfig(
        phases=phases,
        train=TrainConfig(batch_sequences=16, warmup_steps=1, steps=10, lr=1e-3),
        plan=PlanConfig(**plan),
        numerics=NumericsConfig(compute="fp32"),
    )
    return resolve(config, outline=outline_of(specs or gan(), "gan"))


LAYOUTS = {
    1: [{}, {"microbatch": 4, "recompute": "full"}],
    2: [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2, "microbatch": 4},
        {"dp": 2, "zero": 3, "microbatch": 4},
        {"pp": 2, "microbatch": 4},
        {"pp": 2, "microbatch": 4, "schedule": "zb-h1"},
    ],
    4: [{"dp": 2, "pp": 2, "zero": 3, "microbatch": 4}],
}


def _prove_all(rank, world, runs, folder):
    torch.set_num_threads(1)
    here = World(rank, world, Device("cpu"))
    return [
        prove(here, run, batches(), Path(folder), reruns=number == 0, specs=gan()) for number, run in enumerate(runs)
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_reference(gan(), run_of().config.train, batches(), folder)
    torch.set_num_threads(threads)
    return str(folder)


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_computes_what_one_process_does(pool, reference, world):
    runs = [run_of(**plan) for plan in LAYOUTS[world]]
    for run, verdict in zip(runs, pool.run(world, _prove_all, runs, reference, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0


def real(logits: Tensor, targets: Tensor) -> Tensor:
    """The discriminator's loss of the real picture."""
    return F.softplus(-logits[:, 1]).sum()


WEIGHTED = {"judge": {"drawn": lambda logits, targets: F.softplus(logits[:, 0]).sum(), "real": real}, "fool": fool}
SETTINGS = PhasesConfig(
    lr=(("judge", 3e-3),),
    beta1=(("fool", 0.5),),
    beta2=(("judge", 0.99),),
    weight_decay=(("fool", 0.3),),
    clip_norm=(("judge", 0.05),),
    loss_weights=(("drawn", 0.25),),
)


def _prove_settings(rank, world, settings, folder):
    torch.set_num_threads(1)
    specs = weigh_losses(gan(losses=WEIGHTED), dict(settings.loss_weights))
    run = run_of(specs=specs, phases=settings, dp=2, zero=2, microbatch=4)
    return prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=False, specs=specs)


@pytest.mark.multiproc
@pytest.mark.parametrize("left_out", ["", "lr", "beta1", "beta2", "weight_decay", "clip_norm", "loss_weights"])
def test_a_phase_has_settings_and_weights_of_losses_of_its_own(pool, tmp_path, left_out):
    """One that the layout leaves out is noticed."""
    specs = weigh_losses(gan(losses=WEIGHTED), dict(SETTINGS.loss_weights))
    train = run_of().config.train
    phases = {name: train_of_phase(train, SETTINGS, name) for name in PHASES}
    write_reference(specs, train, batches(), tmp_path, phases=phases)
    settings = replace(SETTINGS, **({left_out: ()} if left_out else {}))
    verdict = pool.run(2, _prove_settings, settings, str(tmp_path), timeout_s=60)[0]
    assert verdict.is_proven == (not left_out), verdict.first and verdict.first.describe()


def test_a_model_of_one_phase_has_several_losses():
    double = {"a": judge, "b": judge}
    assert run_of(specs=gan(phases=None, losses=double)).outline.losses == ("a", "b")
    logits = torch.randn(4, 2)
    (*_, last) = weigh_losses(gan(phases=None, losses=double), {"b": 3.0})
    torch.testing.assert_close(last.loss(logits, logits), 4 * judge(logits, logits))


UNKNOWN = [
    ({"lr": (("fuel", 1e-3),)}, "phases.lr.fuel: the model has no phase 'fuel'; choose one of judge, fool."),
    ({"lr": (("fool", 0.0),)}, "phases.lr.fool = 0.0 must be above 0 and finite"),
    ({"beta2": (("fool", 1.0),)}, "phases.beta2.fool = 1.0 must be at least 0 and below 1"),
    ({"loss_weights": (("real", -1.0),)}, "phases.loss_weights.real = -1.0 must be at least 0 and finite"),
    ({"loss_weights": (("reel", 1.0),)}, "phases.loss_weights.reel: the model has no loss 'reel'; "),
]


@pytest.mark.parametrize(("table", "message"), UNKNOWN, ids=[message[:30] for _, message in UNKNOWN])
def test_settings_of_phases_that_cannot_be_are_refused(table, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_of(specs=gan(losses=WEIGHTED), phases=PhasesConfig(**table))


def test_settings_of_phases_need_phases():
    with pytest.raises(ConfigError, match=r"phases\.lr\.judge: the model has no step of several phases; leave"):
        run_of(specs=gan(phases=None, losses=judge), phases=PhasesConfig(lr=(("judge", 1e-3),)))
    with pytest.raises(ConfigError, match=r"phases\.lr\.judge = 'fast' is not valid; it must be a number"):
        parse_config('[phases.lr]\njudge = "fast"\n')
    with pytest.raises(ConfigError, match="two losses have the name 'real'"):
        run_of(specs=gan(losses={"judge": {"real": judge}, "fool": {"real": fool}}))


class _Loose(Engine):
    """An engine that moves a weight of the discriminator in the generator's phase."""

    def train_step(self, *arguments, **named):
        result = super().train_step(*arguments, **named)
        for piece in self.pieces(("weight",)):
            if piece.name == "3.1.weight":
                piece.values[0] += 1e-3
        return result


def _prove_loose(rank, world, run, folder):
    with mock.patch.object(prove_tolerance, "Engine", _Loose):
        return _prove_all(rank, world, [run], folder)[0].first


@pytest.mark.multiproc
def test_a_discriminator_that_moves_in_the_generators_phase_is_named(pool, reference):
    first = pool.run(1, _prove_loose, run_of(), reference)[0]
    assert first.name == "3.1.weight"


def test_a_batch_norm_normalises_by_its_group_in_each_phase_and_its_statistics_move_in_its_own_alone():
    """As torch's train mode does, in which the generator stays while the discriminator is trained."""
    config = run_of().config.train
    (step,) = unit_steps(gan(), config, batches()[:1])
    norm = nn.BatchNorm1d(16)
    first, *_ = UnitGraph(gan(), 0).units
    for rows in batches()[0].fields["latents"].split(4):
        norm(first[0](rows))
    torch.testing.assert_close(step.weights["0.1.running_mean"], norm.running_mean)
    torch.testing.assert_close(step.weights["0.1.running_var"], norm.running_var)


def _merge_alone(self, differences, place):
    """The groups of a microbatch as if they were all."""
    return merge(self, differences, replace(place, sample=0, samples=len(differences) * self.group))


merge = BatchNorm._merge


def _prove_fault(rank, world, run, folder, fault):
    def place_of(*where):
        place = find_place(*where)
        return replace(place, seed=place.seed + rank)

    faults = {
        "a statistic for each microbatch": mock.patch.object(BatchNorm, "_merge", _merge_alone),
        "a seed for each rank": mock.patch.object(build, "find_place", place_of),
    }
    with faults[fault]:
        return _prove_all(rank, world, [run], folder)[0].first


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("a statistic for each microbatch", "running_mean"),
        ("a seed for each rank", "step 0: loss differs"),
    ],
)
def test_a_fault_of_a_rank_is_named(pool, reference, fault, name):
    first = pool.run(2, _prove_fault, run_of(dp=2, zero=2, microbatch=4), reference, fault, timeout_s=60)[0]
    assert name in first.describe(), first.describe()


def cut_gan():
    """The same with a hidden layer in each net, which tp cuts."""
    torch.manual_seed(3)
    modules = [
        nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Unflatten(1, (1, 4, 4))),
        Pair(),
        nn.Sequential(nn.Flatten(2), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 8)),
        nn.Sequential(nn.Linear(8, 1), nn.Flatten()),
    ]
    losses, phases = {"judge": judge, "fool": fool}, {"judge": (2, 3), "fool": (0,)}
    units = as_units(modules, inputs={0: ["latents"], 1: [0, "pixels"]}, loss=losses, phases=phases)
    return _cut(units[0], "0", "2"), units[1], _cut(units[2], "1", "3"), units[3]


def _cut(unit, first, second):
    axes = {f"{first}.weight": ("ffn", None), f"{first}.bias": ("ffn",), f"{second}.weight": (None, "ffn")}
    params = {local: replace(param, axes=axes.get(local, param.axes)) for local, param in unit.params.items()}
    return replace(unit, params=params)


def _prove_cut(rank, world, run, folder):
    torch.set_num_threads(1)
    return prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=True, specs=cut_gan())


@pytest.mark.multiproc
def test_tensor_parallel_ranks_train_both_phases(pool, tmp_path):
    run = run_of(specs=cut_gan(), tp=2, zero=1, microbatch=4, sequence_parallel=False)
    write_reference(cut_gan(), run.config.train, batches(), tmp_path)
    verdict = pool.run(2, _prove_cut, run, str(tmp_path), timeout_s=60)[0]
    assert verdict.is_proven, verdict.first and verdict.first.describe()


class Both(nn.Module):
    """The logits of one picture or of two."""

    def forward(self, *logits: Tensor) -> Tensor:
        return torch.cat(logits, 1)


def apart(phases=None, phase_inputs=None, last=(2, 4)):
    """The same with the drawn and the real picture in units of their own, which share the discriminator's weights."""
    torch.manual_seed(3)
    critic = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 1))
    drawn = nn.Sequential(nn.Linear(6, 16, bias=False), BatchNorm(16, 4), nn.GELU(), nn.Linear(16, 16))
    return as_units(
        [drawn, nn.Unflatten(1, (1, 4, 4)), critic, nn.Identity(), critic, Both()],
        inputs={0: ["latents"], 3: ["pixels"], 5: last},
        loss={"judge": judge, "fool": fool},
        phases=phases or {"judge": (2, 4), "fool": (0,)},
        phase_inputs={"fool": (2,)} if phase_inputs is None else phase_inputs,
    )


def test_a_phase_computes_only_what_leads_to_its_loss():
    first, second = map(compile_step, run_of(specs=apart(), microbatch=16).plan.list_phases())
    assert [i for i in map(describe, first.ranks[0]) if "backward" in i] == [f"backward u{u} m0" for u in (5, 4, 2)]
    assert [describe(i) for i in second.ranks[0]] == [
        "forward u0 m0 keep=all", "forward u1 m0 keep=all", "forward u2 m0 keep=all", "forward u5 m0 keep=all",
        "backward u5 m0", "backward u2 m0", "backward u1 m0", "backward u0 m0", "step",
    ]  # fmt: skip
    assert read_program(write_program(second)) == second
    one = MatmulOperation(rows=16, inner=1, width=1)
    traced = UnitOperations(forward=(one,), backward=(one,), weight=(), input_bytes=0)
    run = run_of(specs=apart(), microbatch=16)
    passes = 6 + 3, 4 + 4  # of each phase, forward and backward
    assert flops_per_token(run, [traced] * 12) * run.targets_of_row == 2 * sum(passes)


APART = [{}, {"dp": 2, "zero": 2, "microbatch": 4}, {"dp": 2, "zero": 3, "microbatch": 4}, {"pp": 2, "microbatch": 4}]


def _prove_apart(rank, world, run, folder):
    torch.set_num_threads(1)
    return prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=True, specs=apart())


@pytest.mark.multiproc
def test_every_layout_computes_the_phases_of_units_apart(pool, tmp_path):
    write_reference(apart(), run_of(specs=apart()).config.train, batches(), tmp_path)
    for plan in APART:
        run = run_of(specs=apart(), **plan)
        verdict = pool.run(run.plan.mesh.world, _prove_apart, run, str(tmp_path), timeout_s=240)[0]
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())


WRONG_INPUTS = [
    ({"phase_inputs": {"foul": (2,)}}, "unit '5' has inputs in phase 'foul', which has no loss; did you mean"),
    ({"phase_inputs": {"fool": (2, 3)}}, "unit '5' takes '3' in phase 'fool' alone; name it in its inputs too."),
    ({"phase_inputs": {"fool": (4,)}}, "phase 'fool' trains unit '0', which does not lead to its loss; name another"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_INPUTS, ids=[message[:40] for _, message in WRONG_INPUTS])
def test_inputs_of_a_phase_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_of(specs=apart(**changes))


def test_a_stage_of_which_a_phase_needs_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"phase 'fool' computes no unit of the stage of unit '3'; set plan\.stages"):
        run_of(specs=apart(), pp=3, microbatch=4, stages=(3, 1, 2))


def test_the_program_of_a_phase_goes_back_to_what_it_trains_and_no_further():
    first, second = map(compile_step, run_of(microbatch=16).plan.list_phases())
    assert [describe(i) for i in first.ranks[0]] == [
        "forward u0 m0 keep=nothing", "forward u1 m0 keep=nothing", "forward u2 m0 keep=nothing",
        "forward u3 m0 keep=all", "forward u4 m0 keep=all", "backward u4 m0", "backward u3 m0", "step",
    ]  # fmt: skip
    assert [describe(i) for i in second.ranks[0]][5:] == [*(f"backward u{u} m0" for u in (4, 3, 2, 1, 0)), "step"]
    for program in (first, second):
        assert read_program(write_program(program)) == program


REFUSED = [
    ({"phases": {"judge": (3, 4), "fool": ()}}, "unit '0' names no phase; give it one of ['judge', 'fool']"),
    ({"phases": {"judge": (0, 1, 3, 4)}}, "phase 'fool' trains nothing; name it in a unit with parameters"),
    ({"phases": {"judge": (3, 9), "fool": (0, 1)}}, "phase 'judge' trains module 9, and there are 5 modules from 0 on"),
    (
        {"phases": {"judge": (3, 4), "foul": (0, 1)}},
        "unit '0' is trained in phase 'foul', which has no loss; did you mean",
    ),
    ({"phases": {"judge": (2, 3, 4), "fool": (0, 1)}}, "unit '2' is trained in phase 'judge' and has no parameters"),
    ({"losses": judge}, "unit '0' is trained in phase 'fool', which has no loss; give the last unit a loss for each"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_phases_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_of(specs=gan(**changes))


def test_a_tensor_is_trained_in_one_phase():
    first, *others = gan()
    shared = replace(others[-1], params={**others[-1].params, "0.weight": first.params["0.weight"]})
    with pytest.raises(ConfigError, match=r"'0.0.weight' (is trained in the phases|.*)"):
        run_of(specs=(first, *others[:-1], shared))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"freeze": FreezeConfig(params=("0.*",))}, "[freeze]"),
        ({"rollback": RollbackConfig()}, "[rollback]"),
        ({"state": StateConfig(fingerprint_every=1)}, "state.fingerprint_every"),
    ],
)
def test_settings_that_know_one_phase_alone_are_refused(change, name):
    config = replace(run_of().config, **change)
    with pytest.raises(ConfigError, match=re.escape(f"{name} with a model whose step has several phases")):
        resolve(config, outline=outline_of(gan(), "gan"))
