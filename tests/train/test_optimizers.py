"""Each optimizer is proven on layouts that shard its moments, in exact mode too, and a run is resumed with its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import runs
import small
from corpus import write_corpus
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.errors import StateError
from superstep.launch.ranks import World
from superstep.plan.optimizers import MOMENTS, state_bytes
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.manifest import read_manifest
from superstep.train.proof.proof_inputs import Cases, prove_case
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.run_folder.identity import identity_of, identity_text, require_same_run

OTHERS = [name for name in MOMENTS if name != "adamw"]
"""AdamW is that of all other tests."""

LAYOUTS = [
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "microbatch": 2},
    {"dp": 2, "zero": 2, "compute": "bf16"},
]


def run(optimizer, **plan):
    config = small.config(layers=2, **plan)
    return resolve(replace(config, train=replace(config.train, optimizer=optimizer)))


def _prove_each(rank, world, cases):
    return [prove_case(World(rank, world, Device("cpu")), case) for case in cases]


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", OTHERS)
def test_every_layout_is_proven(pool, tmp_path, optimizer):
    corpus = write_corpus(tmp_path / "corpus", vocab=small.VOCAB)
    made = {name: Cases(tmp_path / name, corpus, steps=3) for name in ("fp32", "bf16")}
    plans = [run(optimizer, **plan) for plan in LAYOUTS]
    cases = [made[each.config.numerics.compute].case(each, reruns=number == 1) for number, each in enumerate(plans)]
    # The reference knows which it is: another optimizer on the ranks is found.
    train = cases[0].run.config.train
    has_moments = bool(MOMENTS[optimizer])
    changed = {"beta1": 0.8} if has_moments else {"weight_decay": 0.9}
    other = replace(cases[0].run.config, train=replace(train, **changed))
    cases.append(replace(cases[0], run=replace(cases[0].run, config=other)))
    *verdicts, wrong = pool.run(2, _prove_each, cases, timeout_s=240)[0]
    for case, verdict in zip(cases, verdicts, strict=False):
        assert verdict.is_proven, (case.run.config.plan, verdict.first and verdict.first.describe(), verdict.again)
    assert wrong.first is not None
    step = 1 if has_moments else 0  # the first moment of a first step is the same
    assert (wrong.first.step, wrong.first.kind) == (step, "update")


def _exact(rank, world, alone, both, batches, folder):
    here = World(rank, world, Device("cpu"))
    return [
        prove_exact(here, each, batches, folder, Relay(take=folder / "checkpoint", leave=None, step=1)) for each in both
    ]


def _alone(rank, world, alone, batches, folder):
    here = World(rank, world, Device("cpu"))
    write_bits(here, alone, batches, folder, stop=1)


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", OTHERS)
def test_in_exact_mode_it_has_the_same_bits_on_every_layout(pool, tmp_path, optimizer):
    how = {"exact": True, "microbatch": 2}
    alone = run(optimizer, **how)
    both = [run(optimizer, **how, **plan) for plan in ({"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2})]
    batches = small.batches(packed=False)
    (tmp_path / "bits").mkdir()
    pool.run(1, _alone, alone, batches, tmp_path / "bits", timeout_s=120)
    for verdict in pool.run(2, _exact, alone, both, batches, tmp_path / "bits", timeout_s=240)[0]:
        assert verdict.is_proven, verdict.first and verdict.first.describe()


TRAIN = ["train", "run.toml", "--train.lr", "1e-3", "--state.save-every", "2", "--train.steps"]


def _tensors(folder):
    """All tensors of a checkpoint."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", OTHERS)
def test_checkpoints_from_memory_have_its_moments_and_no_other_optimizer_goes_on(
    tmp_path, monkeypatch, capsys, optimizer
):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    chosen = ["--train.optimizer", optimizer]
    shared = ["--plan.dp", "2", "--plan.zero", "1", "--state.snapshot-every", "1"]
    assert main([*TRAIN, "2", *chosen, *shared, "--state.dir", "cut"]) == 0
    (first,) = checkpoints(tmp_path / "cut" / "checkpoints")
    names = set(read_manifest(first).tensors)
    weights = {name for name in names if not name.startswith("exp_avg")}
    assert names == weights | {f"{moment}.{name}" for moment in MOMENTS[optimizer] for name in weights}
    numel = sum(tensor.numel() for name, tensor in _tensors(first).items() if name in weights)
    assert sum(tensor.numel() for tensor in _tensors(first).values()) * 4 == state_bytes(optimizer) * numel
    capsys.readouterr()
    resume = ["--state.dir", "cut", "--state.existing", "resume"]
    assert main([*TRAIN, "4", *resume]) == 2
    said = capsys.readouterr().err
    assert f"is of another run: there train.optimizer = {optimizer}, and here adamw" in said
    assert main([*TRAIN, "4", *resume, *chosen, *shared]) == 0
    told = json.loads((first / "run.json").read_text(encoding="utf-8"))
    assert told["train.optimizer"] == optimizer


@pytest.mark.parametrize("optimizer", OTHERS)
def test_it_goes_on_to_the_same_bits(tmp_path, monkeypatch, optimizer):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    chosen = ["--train.optimizer", optimizer, "--train.min-lr-ratio", "1"]
    assert main([*TRAIN, "4", *chosen, "--state.dir", "whole"]) == 0
    assert main([*TRAIN, "2", *chosen, "--state.dir", "cut"]) == 0
    assert main([*TRAIN, "4", *chosen, "--state.dir", "cut", "--state.existing", "resume"]) == 0
    whole, cut = (_tensors(checkpoints(tmp_path / name / "checkpoints")[-1]) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    losses = [line["loss"] for line in runs.events(tmp_path / "cut", "step")]
    assert losses[-1] < losses[0]


def test_a_checkpoint_that_does_not_name_its_optimizer_is_of_adamw(tmp_path):
    """As those of earlier versions are."""
    told = identity_of(run("adamw"))
    del told["train.optimizer"]
    (tmp_path / "run.json").write_text(identity_text(told), encoding="utf-8")
    require_same_run(tmp_path, identity_of(run("adamw")), converts=False)
    with pytest.raises(StateError, match=r"there train.optimizer = adamw, and here lion\. Move it away"):
        require_same_run(tmp_path, identity_of(run("lion")), converts=False)
