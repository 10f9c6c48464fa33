"""Runs on text, sounds and both: Qwen2-Audio's encoder and decoder on every layout."""

import re

import pytest
import torch

import runs
from sound_samples import SAMPLES, write_sounds
from superstep.cli.main import main
from superstep.model.multimodal.audio import number_sounds


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_sounds(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sounds_of_a_row_are_numbered():
    frames = torch.tensor([[0, 1, 0, 1, 2, 3, 0, 0]])
    numbers = torch.tensor([[0, 0, 0, 0, 0, 0, -1, -1]])
    assert number_sounds(frames, numbers).tolist() == [[0, 0, 1, 1, 1, 1, -1, -1]]


def test_every_layout_has_the_same_bits(here, capfd):
    assert main(["prove", "run.toml", "--exact", "--all", "--world", "4"]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


CP = "--plan.cp", "2", "--numerics.exact-chunks", "4"


@pytest.mark.parametrize("encoder", ["spread", "bubbles"])
@pytest.mark.parametrize("cp", [(), CP], ids=["pp", "pp-cp"])
def test_pipeline_ranks_share_an_encoder_of_sounds(here, capfd, encoder, cp):
    layout = ["--plan.pp", "2", "--plan.dp", "1", "--plan.zero", "0", "--plan.encoder", encoder, *cp]
    assert main(["prove", "run.toml", "--exact", *layout]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_tensor_parallel_ranks_share_encoder_and_decoder(here, capfd):
    tp = ["--plan.tp", "2", "--plan.dp", "1", "--plan.zero", "0", "--plan.sequence-parallel", "false"]
    assert main(["prove", "run.toml", *tp]) == 0
    assert "PROVEN: tp=2" in capfd.readouterr().out


def test_a_run_goes_on_with_the_same_bits(here):
    assert main(["train", "run.toml", "--state.dir", "whole"]) == 0
    runs.resume_killed()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("audio_token=SOUND", "audio_token=29"), "at the tokens [29], and the samples' PLACEHOLDERS has [30]"),
        (("(SOUND, 4)", "(SOUND, 2)"), "samples have room for 24 of these tokens"),
        (("places=12", "places=4"), "has 16 frames of 160, and the encoder takes 4 to 8; cut it"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(tmp_path, monkeypatch, capfd, change, says):
    monkeypatch.chdir(tmp_path)
    write_sounds(tmp_path, SAMPLES.replace(*change))
    assert main(["prove", "run.toml", "--plan.dp", "1", "--plan.zero", "0"]) == 2
    err = capfd.readouterr().err
    assert says in err
    assert re.fullmatch(r"superstep: [^\n]+\n", err)
