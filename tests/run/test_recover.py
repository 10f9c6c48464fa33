"""When a run is gone on with after ranks were lost, and when it is not."""

import threading
from unittest import mock

import pytest

from superstep.cli.main import main
from superstep.errors import Fault, RankLost
from superstep.run import launch_rules, recover


def _run(steps, ending, passed_over=()):
    """Launches that lose a rank where the memories hold these ``steps``, then one that ends; what each was told."""
    told = []

    def launch(recovered):
        told.append(recovered and recovered.step)
        if len(told) > len(steps):
            return ending()
        raise RankLost("killed", rank=1)

    found = [(step, passed_over) for step in steps]
    with mock.patch.object(recover, "newest_undamaged", side_effect=found):
        return recover.recovering(launch, [], threading.Lock(), lambda: None), told


def test_a_run_goes_on_as_long_as_it_gets_further():
    assert _run([3, 3, 4, 7, 9, 9, 9], lambda: False) == (False, [None, 3, 3, 4, 7, 9, 9, 9])


def test_it_ends_with_the_fault_after_the_same_step_again_and_again_or_without_a_snapshot():
    with pytest.raises(RankLost, match="rank 1: killed"):
        _run([3, 3, 3, 3], lambda: False)
    with pytest.raises(RankLost, match="rank 1: killed"):
        _run([None], lambda: False)


def test_it_goes_on_without_a_snapshot_where_all_are_damaged_as_a_checkpoint_may_be_whole():
    assert _run([3, None], lambda: False, ("rank 1: damaged",)) == (False, [None, 3, None])


def test_a_rank_that_raised_itself_would_do_so_again():
    def diverged():
        raise Fault("loss nan", rank=0)

    with pytest.raises(Fault, match="loss nan"):
        _run([3], diverged)


def test_ranks_of_others_have_nobody_who_outlives_them(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_rules.sys, "platform", "darwin")
    assert main(["train", "--state.snapshot-every", "2", "--plan.dp", "1"]) == 2
    assert "state.snapshot_every = 2 needs ranks that superstep launches itself, on Linux" in capsys.readouterr().err
    assert main(["train", "--state.snapshot-every", "0"]) == 2
    assert "state.snapshot_every = 0" in capsys.readouterr().err
