"""Every rank says how long a step is to take: by that it is judged until it has done one."""

import os

import pytest

import runs
from superstep.cli.main import main
from superstep.launch import ranks
from superstep.monitor.status_page import StatusPage

pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")]


def test_every_rank_says_how_long_a_step_is_to_take(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    expected_s = []

    class Kept(StatusPage):
        def close(self):
            expected_s.append(self.read().expected_s)
            super().close()

    monkeypatch.setattr(ranks, "page", Kept)
    assert main(["train", "run.toml", "--plan.dp", "2", "--train.steps", "1"]) == 0
    assert len(expected_s) == 2
    assert expected_s[0] == expected_s[1] > 0
