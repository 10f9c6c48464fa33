"""What the bench of GANs says of drawn digits: pictures that it knows, and a run's own newest weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench import gan
from digits import write_digits
from superstep.cli.main import main

ROOT = Path(__file__).parents[2]


class Draws(nn.Module):
    """In place of a generator: the class that is given, of every fourth picture the next one."""

    def forward(self, latents: Tensor) -> Tensor:
        given = latents[:, gan.LATENTS :].argmax(-1)
        return (given + (torch.arange(len(given)) % 4 == 0)) % gan.CLASSES


class Reads(nn.Module):
    """In place of a classifier: sure of every picture but nines."""

    def forward(self, drawn: Tensor) -> Tensor:
        sizes = torch.where(drawn == 9, 1.0, 20.0)
        return nn.functional.one_hot(drawn, gan.CLASSES) * sizes[:, None]


class Run(nn.Module):
    """The units of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Draws(), nn.Identity()])


def test_the_shares_are_those_of_sure_pictures_and_of_all():
    verdict = gan.judge(Run(), Reads())
    nines = verdict["shares"][9]
    assert verdict["recognised"] == pytest.approx(1 - nines)
    assert verdict["asked"] < verdict["recognised"]
    assert sum(verdict["shares"]) == pytest.approx(1)


@pytest.mark.multiproc
def test_runs_are_judged_by_their_newest_weights(tmp_path, monkeypatch, capfd):
    write_digits(tmp_path / "runs" / "digits")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    few = ["--train.batch-sequences", "16", "--train.steps", "2", "--plan.dp", "1"]
    for name in ("gan", "lenet"):
        assert main(["train", f"recipes/{name}.toml", *few]) == 0
    out = tmp_path / "gan.json"
    assert gan.main(["runs/gan", "runs/gan", "runs/lenet", "--out", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    first, second = written["runs"]
    assert first == second
    assert first["checkpoint"] == "step-000002"
    assert 0 <= first["recognised"] <= 1
    assert written["wanted"]["recognised"] == 0.9
