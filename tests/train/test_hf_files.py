"""A checkpoint opens in transformers with its tokenizer, and generation ends where a document does."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import runs
from superstep.cli.main import main
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.weights.hf_files import hf_files

transformers = pytest.importorskip("transformers")

PROMPT = "the quick brown fox"


def _checkpoint(folder, monkeypatch, *flags):
    """The folder of a checkpoint that training left."""
    runs.make_files(folder)
    monkeypatch.chdir(folder)
    assert main(["train", "run.toml", "--train.steps", "2", "--train.eval-every", "2", *flags]) == 0
    return checkpoints(folder / "run" / "checkpoints")[-1]


def _always(model, token):
    """Plant weights by which every position gives one token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.zero_()[:, 0] = 1.0
        model.get_output_embeddings().weight[token, 0] = 2.0


def test_generation_ends_with_the_document(tmp_path, monkeypatch):
    place = _checkpoint(tmp_path, monkeypatch)
    end = json.loads((place / "corpus.json").read_text())["end_of_text"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|endoftext|>", end, None)
    given = tokenizer(PROMPT, return_tensors="pt")
    assert end not in given["input_ids"]
    assert tokenizer.decode([*given["input_ids"][0], end], skip_special_tokens=True) == PROMPT

    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    assert (model.config.eos_token_id, model.config.bos_token_id) == (end, None)
    length = given["input_ids"].shape[1]
    _always(model, end + 1)
    assert model.generate(**given, max_new_tokens=20, do_sample=False).shape[1] == length + 20
    _always(model, end)
    assert model.generate(**given, max_new_tokens=20, do_sample=False)[0, length:].tolist() == [end]
    # Without generation_config.json it is config.json that says so.
    (place / "generation_config.json").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    _always(model, end)
    assert model.generate(**given, max_new_tokens=20, do_sample=False)[0, length:].tolist() == [end]


def test_a_foreign_folder_keeps_its_tokens(tmp_path, monkeypatch):
    """Its own ends of a text, its own words for special tokens, its own settings; our end of a document joins them."""
    first = _checkpoint(tmp_path, monkeypatch)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(first / name, foreign / name)
    raw = json.loads((foreign / "config.json").read_text())
    raw |= {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9}
    (foreign / "config.json").write_text(json.dumps(raw))
    told = json.loads((foreign / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (foreign / "tokenizer_config.json").write_text(json.dumps(told))
    (foreign / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 11], "temperature": 0.6}))

    flags = (
        "--state.dir",
        "second",
        "--model.name",
        "foreign/config.json",
        "--data.tokenizer",
        "foreign/tokenizer.json",
    )
    _checkpoint(tmp_path, monkeypatch, *flags)
    place = checkpoints(tmp_path / "second" / "checkpoints")[-1]
    end = json.loads((place / "corpus.json").read_text())["end_of_text"]
    config = transformers.AutoConfig.from_pretrained(place)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, [8, 11, end], 9)
    generation = transformers.GenerationConfig.from_pretrained(place)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (7, [8, 11, end], 9)
    assert generation.temperature == 0.6
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == ("{{ messages }}", end)


def test_a_foreign_shape_with_a_tokenizer_of_ones_own_has_the_tokens_of_that(tmp_path, monkeypatch):
    """The ids of another vocabulary would be any words of this one."""
    place = _checkpoint(tmp_path, monkeypatch)
    raw = json.loads((place / "config.json").read_text())
    end = raw["eos_token_id"]
    (tmp_path / "foreign.json").write_text(json.dumps(raw | {"bos_token_id": 7, "eos_token_id": 8}))
    run = replace(runs.make_files(tmp_path), model=ModelConfig(name="foreign.json"))
    files = hf_files(run, shape_of(run.model), place / "tokenizer.json")
    told = json.loads(files["config.json"])
    assert (told["bos_token_id"], told["eos_token_id"]) == (None, end)
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": end, "pad_token_id": end}

    (tmp_path / "tokenizer_config.json").write_text("{")
    shutil.copy(place / "tokenizer.json", tmp_path / "tokenizer.json")
    assert main(["train", "run.toml", "--state.dir", "other", "--data.tokenizer", "tokenizer.json"]) == 2
