"""`superstep prove --faults`: what happens to a run leaves no mark on it, and where something did, that is said."""

import json

import pytest

import runs
from superstep.cli.main import main
from superstep.cli.prove import fault_injection, faults
from superstep.cli.prove.fault_injection import KINDS, FaultOutcome, FaultyRun, compare_steps
from superstep.cli.prove.faults import hurt_config, prove_faults, verdict
from superstep.data.preparation.prepare import prepare
from superstep.plan.config_io import read_config
from superstep.train.weights.model import resolve_config

pytestmark = pytest.mark.skipif(not hasattr(fault_injection.resource, "prlimit"), reason="needs Linux")

FLAGS = ["run.toml", "--plan.dp", "2", "--plan.zero", "1"]


def _proven(said, kinds):
    *rows, last = said.strip().splitlines()
    told = {kind: [row for row in rows if row.startswith(f"  {faults.DESCRIBED[kind]} ")] for kind in kinds}
    assert all(len(rows) == 1 for rows in told.values()), said
    assert last.startswith(f"PROVEN: {len(kinds)} faults within "), said
    assert "nothing is left behind." in last


@pytest.mark.long
@pytest.mark.multiproc
def test_a_hung_rank_a_full_disk_and_a_damaged_checkpoint_leave_every_bit(tmp_path, monkeypatch, capfd):
    """And a launcher that was killed; ranks that are killed or stopped are those of ``test_snapshot_recovery``."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = resolve_config(runs.config(plan={"dp": 2, "zero": 1}))
    kinds = ("hung", "full disk", "damaged")
    prepare(run.config.data, run.config.model.vocab, tmp_path / "tokens")
    assert prove_faults(run, tmp_path / "tokens", kinds=kinds) == 0
    _proven(capfd.readouterr().out, kinds)


@pytest.mark.slow
@pytest.mark.multiproc
def test_every_fault_leaves_every_bit(tmp_path, monkeypatch, capfd):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["prove", *FLAGS, "--faults"]) == 0
    _proven(capfd.readouterr().out, KINDS)


def test_what_cannot_be_hurt_is_refused(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["prove", *FLAGS, "--faults", "--all"]) == 2
    assert "--faults injects faults into one run; leave --all and --serve out." in capsys.readouterr().err


def _told(tmp_path, name, losses, first=1):
    """A run that told of these losses."""
    run = FaultyRun(hurt_config(read_config(tmp_path / "run.toml"), tmp_path, tmp_path / name), tmp_path)
    run.folder.root.mkdir()
    lines = [
        {"event": "step", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1}
        for step, loss in enumerate(losses, start=first)
    ]
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def test_a_bit_a_step_or_a_word_that_is_wrong_is_no_proof(tmp_path):
    runs.make_files(tmp_path)
    whole = _told(tmp_path, "whole", [3.0, 2.0, 1.0])
    assert compare_steps(_told(tmp_path, "same", [3.0, 2.0]), whole) == (2, "")
    count, differs = compare_steps(_told(tmp_path, "other", [3.0, 2.0000000000000004]), whole)
    assert (count, differs) == (2, "step 2: loss 2.0000000000000004, and 2.0 undisturbed")
    assert "reported twice" in compare_steps(_told(tmp_path, "late", [2.0, 1.0], first=2), whole)[1]
    assert "undisturbed" in compare_steps(_told(tmp_path, "longer", [3.0, 2.0, 1.0, 0.5]), whole)[1]
    lost = FaultOutcome(kind="killed", what="rank 1", step=7, noticed_s=0.1, again_s=2.0, redone=1)
    assert verdict([lost], 9, []).startswith("PROVEN: 1 faults within 9 steps")
    assert "a lost rank cost 1 step at most" in verdict([lost], 9, [])
    assert verdict([lost], 9, ["it reported rank 1 as: rank 0"]) == "NOT PROVEN: 1 faults within 9 steps, 1 wrong."
