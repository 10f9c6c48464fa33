"""Qwen2-Audio beside transformers: logits, every gradient, and folders that are read and written."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_audio import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from beside_transformers import (
    assert_gradient,
    go_back_alike,
    read_encoder_of,
    run_of,
    save_randomly,
    train_from_folder,
)
from sound_samples import SAMPLES, write_sounds
from superstep.cli.main import main
from superstep.data.samples.log_mel import cut_frames
from superstep.errors import ConfigError, DataError
from superstep.model.files.hf import load_weights
from superstep.model.multimodal.audio import sinusoids
from superstep.model.multimodal.qwen2_audio import audio_language_units
from superstep.model.unit import UnitGraph
from superstep.plan.model.multimodal.audio_shape import AudioShape
from superstep.plan.model.multimodal.families import read_multimodal
from superstep.plan.model.multimodal.hf_qwen2_audio import read_qwen2_audio, write_qwen2_audio

SOUND, FRAMES = 30, 48


def write_folder(folder):
    """A model of transformers with random weights, and its folder."""
    torch.manual_seed(0)
    text = {
        "model_type": "qwen2", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    audio = {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 40, "d_model": 24, "max_source_positions": FRAMES // 2,
    }  # fmt: skip
    config = Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=SOUND)
    return save_randomly(Qwen2AudioForConditionalGeneration(config), folder)


def published(name):
    """A parameter's name in a folder, of the name in transformers."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


@pytest.mark.parametrize("sounds", [[20, 8], [48], []])
def test_logits_and_gradients_are_those_of_transformers(tmp_path, sounds):
    theirs = write_folder(tmp_path)
    ours = UnitGraph(audio_language_units(read_multimodal(run_of(tmp_path))), 0)
    load_weights(tmp_path, {name: parameter for name, (_, parameter) in ours.parts.items()})
    tokens, place = torch.randint(1, 27, (22,)), 2
    for frames in sounds:
        tokens[place : place + frames // 4] = SOUND
        place += frames // 4 + 2
    mels, missing = [torch.randn(frames, 8) for frames in sounds], FRAMES - sum(sounds)
    fields = {
        "tokens": tokens,
        "mel": torch.cat([*mels, torch.randn(missing, 8)]),
        "frames": torch.cat([*(torch.arange(frames) for frames in sounds), torch.zeros(missing, dtype=torch.long)]),
        "mel.sample": torch.tensor([0] * sum(sounds) + [-1] * missing),
    }
    given = {}
    if sounds:  # transformers fills each sound up with zeros
        given["input_features"] = torch.stack([F.pad(mel.t(), (0, FRAMES - mel.shape[0])) for mel in mels])
        given["feature_attention_mask"] = (torch.arange(FRAMES) < torch.tensor(sounds).unsqueeze(1)).long()
    wanted = theirs(input_ids=tokens[None], **given).logits
    logits = ours({name: values[None] for name, values in fields.items()})
    go_back_alike(logits, wanted)
    named = {published(name): parameter for name, parameter in theirs.named_parameters()}
    assert named.keys() == ours.parts.keys()
    for name, (_, parameter) in ours.parts.items():
        gradient = named[name].grad
        if gradient is None:  # the table of positions is not trained; without a sound no part of the encoder is
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert_gradient(parameter, gradient, name)


def test_frames_are_those_of_whisper_in_128_bands():
    shape = AudioShape(layers=1, width=8, heads=1, ffn=8, bands=128, places=1500, outputs=8)
    sound = torch.randn(16000, generator=torch.Generator().manual_seed(0))
    theirs = WhisperFeatureExtractor(feature_size=128)(sound.numpy(), sampling_rate=16000, return_tensors="pt")
    mel, frames = cut_frames(sound, shape)
    assert mel.shape == (100, 128)
    assert frames.tolist() == list(range(100))
    # The last frame's window reaches behind the sound, where Whisper has silence and log_mel the sound mirrored.
    torch.testing.assert_close(mel[:-1], theirs.input_features[0].t()[:99], atol=1e-5, rtol=0)
    for samples in (639, 480641):
        with pytest.raises(DataError, match="the encoder takes 4 to 3000"):
            cut_frames(torch.zeros(samples), shape)


def test_new_positions_are_the_sinusoids_of_whisper():
    angles = torch.arange(6) * 10000 ** (-torch.arange(4) / 3).unsqueeze(1)
    torch.testing.assert_close(sinusoids(6, 8), torch.cat([angles.sin(), angles.cos()]).t())


def test_a_folder_is_read_trained_and_written_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(Path("hf"))
    write_sounds(tmp_path, read_encoder_of(SAMPLES, "audio"))
    checkpoint, before = train_from_folder("sounds.py")
    loaded = Qwen2AudioForConditionalGeneration.from_pretrained(checkpoint)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[published(name)])
    assert loaded.config.audio_token_id == SOUND
    assert main(["train", "run.toml", "--train.steps", "2", "--state.dir", "moved"]) == 0
    moved = load_file(next(Path("moved/checkpoints").iterdir()) / "model.safetensors")
    assert [name for name in before if torch.equal(before[name], moved[name])] == ["audio_tower.embed_positions.weight"]
    assert main(["prove", "run.toml", "--exact", "--plan.zero", "3"]) == 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("audio_config", "activation_function", "relu"), 'audio_config.activation_function = "relu" is not supported'),
        (("audio_config", "encoder_layerdrop", 0.1), "audio_config.encoder_layerdrop = 0.1 is not supported"),
        (("audio_config", "scale_embedding", True), "audio_config.scale_embedding = true is not supported"),
        (("audio_config", "max_source_positions", 25), "max_source_positions = 25 must be an even number"),
        (("audio_config", "d_model", 25), "d_model = 25 must be a multiple of encoder_attention_heads = 2"),
        (("audio_config", "window_size", 4), "audio_config.window_size = 4 is not known and may change the model"),
        (("text_config", "model_type", "llama"), 'text_config.model_type = "llama" is not supported'),
        (("text_config", "tie_word_embeddings", True), "text_config.tie_word_embeddings = true is not supported"),
        ((None, "audio_token_index", 99), "audio_token_index = 99 must be a token from 1 to 31"),
        ((None, "audio_config", 3), "audio_config = 3 must be an object"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_supported_is_refused_by_its_key(tmp_path, keys, says):
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    part, key, value = keys
    (raw if part is None else raw[part])[key] = value
    with pytest.raises(ConfigError, match=r"config\.json: ") as refused:
        read_qwen2_audio(raw, "config.json: ")
    assert says in str(refused.value)


def test_a_shape_is_read_as_it_was_written(tmp_path):
    write_folder(tmp_path)
    shape = read_multimodal(run_of(tmp_path))
    assert read_qwen2_audio(json.loads(json.dumps(write_qwen2_audio(shape))), "") == shape


def test_the_published_file_is_read():
    """Qwen2-Audio-7B's, which leaves out what is transformers' default."""
    text = {
        "bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "max_position_embeddings": 8192,
        "model_type": "qwen2", "rms_norm_eps": 1e-05, "rope_theta": 10000, "torch_dtype": "bfloat16",
        "use_mrope": False, "vocab_size": 156032,
    }  # fmt: skip
    audio = {
        "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "d_model": 1280,
        "dropout": 0.0, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0,
        "encoder_layers": 32, "init_std": 0.02, "initializer_range": 0.02, "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "scale_embedding": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    raw = {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": audio, "audio_token_index": 151646,
        "ignore_index": -100, "model_type": "qwen2_audio", "text_config": text, "torch_dtype": "bfloat16",
        "transformers_version": "4.38.1", "vocab_size": 156032,
    }  # fmt: skip
    shape = read_qwen2_audio(raw, "config.json: ")
    assert (shape.audio.layers, shape.audio.width, shape.decoder.layers, shape.decoder.width) == (32, 1280, 32, 4096)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["train", "--model.name", "config.json"], "reads more than text; set data.source to a Python file of samples"),
        (["plan", "config.json", "--cluster", "8xH100"], "reads sounds: superstep train and prove take it"),
        (["serve", "."], "reads sounds: superstep train and prove take it"),
    ],
)
def test_a_command_that_cannot_take_it_says_so(tmp_path, monkeypatch, capfd, flags, says):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    assert main(flags) == 2
    assert says in capfd.readouterr().err
