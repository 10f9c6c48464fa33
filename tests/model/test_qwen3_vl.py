"""Qwen3-VL beside transformers: logits, every gradient, and folders that are read and written."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from beside_transformers import (
    assert_gradient,
    go_back_alike,
    read_encoder_of,
    run_of,
    save_randomly,
    train_from_folder,
)
from picture_samples import SAMPLES, write_pictures
from superstep.cli.main import main
from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.errors import ConfigError
from superstep.model.files.hf import load_weights
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.model.unit import UnitGraph
from superstep.plan.model.multimodal.families import read_multimodal
from superstep.plan.model.multimodal.hf_qwen3_vl import read_qwen3_vl, write_qwen3_vl

IMAGE, PATCHES = 30, 48


def write_folder(folder, *, tied=False, deepstack=(0, 1)):
    """A model of transformers with random weights, and its folder."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 2, "out_hidden_size": 32,
        "temporal_patch_size": 1, "num_position_embeddings": 25, "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=IMAGE, video_token_id=29,
        vision_start_token_id=28, vision_end_token_id=27,
    )  # fmt: skip
    return save_randomly(Qwen3VLForConditionalGeneration(config), folder)


@pytest.mark.parametrize("deepstack", [(), (0, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_transformers(tmp_path, deepstack, tied):
    theirs = write_folder(tmp_path, tied=tied, deepstack=deepstack)
    shape = read_multimodal(run_of(tmp_path))
    ours = UnitGraph(vision_language_units(shape), 0)
    load_weights(tmp_path, {name: parameter for name, (_, parameter) in ours.parts.items()})
    grids = [(4, 6), (2, 4)]
    tokens = torch.randint(1, 27, (20,))
    tokens[3:9] = tokens[12:14] = IMAGE
    cut = [cut_patches(torch.randn(3, 2 * rows, 2 * columns), shape.vision) for rows, columns in grids]
    pixels, patches = (torch.cat(parts) for parts in zip(*cut, strict=True))
    missing = PATCHES - len(pixels)
    fields = {
        "tokens": tokens,
        "positions": place_tokens(tokens, IMAGE, grids, 2),
        "pixels": torch.cat([pixels, torch.randn(missing, pixels.shape[1])]),
        "patches": torch.cat([patches, torch.zeros(missing, 4, dtype=torch.long)]),
        "pixels.sample": torch.tensor([0] * len(pixels) + [-1] * missing),
    }
    wanted = theirs(
        input_ids=tokens[None],
        pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, *grid] for grid in grids]),
        mm_token_type_ids=(tokens == IMAGE).long()[None],
    ).logits
    logits = ours({name: values[None] for name, values in fields.items()})
    go_back_alike(logits, wanted)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == ours.parts.keys()
    for name, (_, parameter) in ours.parts.items():
        assert_gradient(parameter, gradients[name], name)


def test_a_folder_is_read_trained_and_written_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(Path("hf"))
    write_pictures(tmp_path, read_encoder_of(SAMPLES, "vision"))
    checkpoint, before = train_from_folder("pictures.py")
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name])
    assert loaded.config.text_config.rope_parameters["mrope_section"] == [4, 2, 2]
    assert main(["prove", "run.toml", "--exact", "--plan.zero", "3"]) == 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("vision_config", "hidden_act", "silu"), 'vision_config.hidden_act = "silu" is not supported'),
        (("vision_config", "num_position_embeddings", 24), "num_position_embeddings = 24 must be a square number"),
        (("vision_config", "deepstack_visual_indexes", [0, 7]), "must be growing numbers of layers, below 3"),
        (("vision_config", "out_hidden_size", 16), "vision_config.out_hidden_size = 16 is not supported; it must be"),
        (("vision_config", "window_size", 4), "vision_config.window_size = 4 is not known and may change the model"),
        (("text_config", "attention_bias", True), "text_config.attention_bias = true is not supported"),
        (("image_token_id", None, 99), "image_token_id = 99 must be a token from 1 to 31"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_supported_is_refused_by_its_key(tmp_path, keys, says):
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    place, key, value = keys
    if key is None:
        raw[place] = value
    else:
        raw[place][key] = value
    with pytest.raises(ConfigError, match=r"config\.json: ") as refused:
        read_qwen3_vl(raw, "config.json: ")
    assert says in str(refused.value)


def test_a_shape_is_read_as_it_was_written(tmp_path):
    write_folder(tmp_path)
    shape = read_multimodal(run_of(tmp_path))
    assert read_qwen3_vl(json.loads(json.dumps(write_qwen3_vl(shape))), "") == shape


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["train", "--model.name", "config.json"], "reads more than text; set data.source to a Python file of samples"),
        (
            ["train", "--model.name", "config.json", "--data.source", "s.py", "--model.layers", "2"],
            "model.layers = 2 with model.name",
        ),
        (["plan", "config.json", "--cluster", "8xH100"], "reads pictures: superstep train and prove take it"),
    ],
)
def test_a_command_that_cannot_take_it_says_so(tmp_path, monkeypatch, capfd, flags, says):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    assert main(flags) == 2
    assert says in capfd.readouterr().err
