"""Runs on text, pictures and both: an encoder's rows at the places of their tokens, on every layout."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import runs
from picture_samples import SAMPLES, write_pictures
from superstep.cli.main import main
from superstep.engine.values.microbatch import number_equal
from superstep.model.multimodal.place_rows import place_rows

SPREAD = "--plan.encoder", "spread"
EXPERTS = """
from dataclasses import replace
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

DECODER = replace(DECODER, moe=shape_of(ModelConfig(name="tiny", experts=4)).moe)
SHAPE = V"""
EXACT_TP = "--numerics.exact", "true", "--plan.tp", "2", "--plan.sequence-parallel", "false"


@pytest.fixture(params=[(), (0, 1)], ids=["chain", "deepstack"])
def here(request, tmp_path, monkeypatch):
    write_pictures(tmp_path, deepstack=request.param)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_token_takes_the_row_of_its_number():
    x, rows = torch.zeros(2, 5, 3), torch.arange(1, 13).view(2, 2, 3).float().requires_grad_()
    is_place = torch.tensor([[False, True, False, True, False], [True, False, False, False, False]])
    out = place_rows(x, rows, is_place)
    assert out[..., 0].tolist() == [[0, 1, 0, 4, 0], [7, 0, 0, 0, 0]]
    out.sum().backward()
    assert rows.grad[..., 0].tolist() == [[1, 1], [1, 0]]  # the second row of the second is padding


def test_accuracy_is_told_where_a_decoder_ends_the_model(here):
    """All targets are one token, which a few steps learn."""
    write_pictures(here, SAMPLES.replace('"target": (tokens + len(pictures)) % 29', '"target": tokens * 0 + 3'))
    steps = ["--train.steps", "12", "--train.eval-every", "12", "--train.lr", "2e-2", "--state.save-every", "12"]
    assert main(["train", "run.toml", *steps]) == 0
    (evaluated,) = runs.events(Path("run"), "evaluated")
    assert evaluated["accuracy"] == 1.0


def test_every_layout_has_the_same_bits(here, capfd):
    assert main(["prove", "run.toml", "--exact", "--all", "--world", "4"]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_tensor_parallel_ranks_share_encoder_and_decoder(here, capfd):
    tp = ["--plan.tp", "2", "--plan.dp", "1", "--plan.zero", "0", "--plan.sequence-parallel", "false"]
    assert main(["prove", "run.toml", *tp]) == 0
    assert "PROVEN: tp=2" in capfd.readouterr().out


def test_ranks_that_share_tokens_have_the_same_bits(here, capfd):
    layout = ["--plan.cp", "2", "--plan.pp", "2", "--plan.dp", "1", "--plan.zero", "0", "--numerics.exact-chunks", "4"]
    assert main(["prove", "run.toml", "--exact", *layout]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


@pytest.mark.parametrize("here", [(0, 1)], indirect=True, ids=["deepstack"])
def test_no_unit_waits_for_a_copy_to_the_gpu(here):
    """In a process of its own: the emulated GPU is loaded before torch."""
    command = [sys.executable, "-m", "superstep", "prove", "run.toml", "--device", "strict:2"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert "NO RACE" in out
    assert "copy_ to the device (superstep/model" not in out


def test_tokens_are_counted_among_equal_ones_of_their_row():
    numbers = number_equal(torch.tensor([[3, 7, 3, 3, 7], [7, 7, 7, 3, 3]]))
    assert numbers.tolist() == [[0, 0, 1, 2, 1], [0, 1, 2, 0, 1]]


def test_a_run_goes_on_with_the_same_bits(here):
    assert main(["train", "run.toml", "--state.dir", "whole"]) == 0
    runs.resume_killed()


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (("token=PICTURE", "token=29"), [], "encoders at the tokens [29], and the samples' PLACEHOLDERS has [30]"),
        (("PLACEHOLDERS = ", "HOLDERS = "), [], "encoders at the tokens [30], and the samples' PLACEHOLDERS has []"),
        (("(PICTURE, MERGE**2)", "(PICTURE, 2)"), [], "samples have room for 24 of these tokens"),
        (("merge=MERGE, side", "merge=4, side"), [], "reads 3 rows of an encoder at the tokens 30"),
        (("", ""), [*EXACT_TP], "exact mode has no loss over a vocabulary that tp cuts"),
        (("", ""), [*EXACT_TP, "--plan.rules.vocab", "none"], "'model.visual.blocks.0.attn.qkv.weight' has 3 parts"),
        (("", ""), ["--plan.cp", "5"], "CAPACITY = 24 must be a multiple of 10: plan.cp = 5 cuts it into 10 chunks"),
        (("", ""), ["--plan.cp", "2", "--numerics.exact", "true"], "a sequence has 1 parts, as many for each"),
        (("", ""), ["--plan.ep", "2"], "plan.ep = 2"),
        (("SHAPE = V", EXPERTS), [], "the decoder behind encoders has a mixture of 4 experts, and tokens are sent to"),
        (("", ""), ["--plan.pp", "2", "--plan.schedule", "interleaved", "--plan.chunks", "2"], "rank 0 twice"),
        (("", ""), SPREAD, "shares an encoder between pipeline ranks, and plan.pp = 1"),
        (("", ""), ["--plan.encoder", "bubbles"], "'bubbles' shares an encoder between pipeline ranks, and"),
        (("", ""), [*SPREAD, "--plan.pp", "2", "--plan.chunks", "2"], "'interleaved' has several; set plan.schedule"),
        (("", ""), [*SPREAD, "--plan.pp", "2", "--plan.microbatch", "8"], "a step has 1; raise train.batch"),
        (("", ""), [*SPREAD, "--plan.pp", "2", "--plan.stages", "[1,4]"], "unit 'block.0' of a later one takes them"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(tmp_path, monkeypatch, capfd, change, flags, says):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path, SAMPLES.replace(*change), deepstack=(0, 1))
    assert main(["prove", "run.toml", "--plan.dp", "1", "--plan.zero", "0", *flags]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert re.fullmatch(r"superstep: [^\n]+\n", err)
