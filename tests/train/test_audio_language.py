"""The recipe of spoken languages: its samples and model, and the script that takes prompts out of packages."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from prompts import PITCHES, write_prompts, write_wav
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.noise import noise_of
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.plan.config import RunConfig

SMALL = ["--model.width", "32", "--model.heads", "2", "--model.layers", "1", "--train.batch-sequences", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_prompts(tmp_path / "runs" / "prompts")
    return enter_folder(tmp_path, monkeypatch)


def test_a_sample_is_another_part_of_a_long_prompt_in_each_epoch(here):
    check_pure(open_samples("recipes/audio_language.py"), seed=0)
    recipe = load_recipe("audio_language")
    assert recipe.size("train", 0) == {"mel": 400, "target": 1}
    first, again, later = (recipe.sample("train", 0, noise_of(0, "train", epoch, 0))["mel"] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert recipe.sample("train", 1, noise_of(0, "train", 0, 1))["target"].tolist() == [1]
    held_out = recipe.sample("validation", 2, noise_of(0, "validation", 0, 2))["mel"]
    assert torch.equal(held_out, recipe.mel("validation", 2)[: len(held_out)])


def test_the_encoder_sees_each_sample_as_if_it_stood_alone(here):
    recipe = load_recipe("audio_language")
    stem, *blocks, classify = [unit.build() for unit in recipe.units(RunConfig())]

    def logits(samples):
        mel, numbers = torch.zeros(1, 800, 80), torch.full((1, 800), -1)
        at = 0
        for number, sample in enumerate(samples):
            mel[0, at : at + len(sample)], numbers[0, at : at + len(sample)] = sample, number
            at += len(sample)
        x = stem(mel, numbers)
        for block in blocks:
            x = block(x, numbers)
        return classify(x, numbers)[0, : len(samples)]

    samples = [torch.randn(size, 80) for size in (120, 64, 300)]
    together = logits(samples)
    for number, sample in enumerate(samples):
        torch.testing.assert_close(together[number], logits([sample])[0], atol=1e-5, rtol=1e-4)


def test_the_recipe_learns_and_its_layout_is_proven_bit_by_bit(here, capfd):
    short = ["--train.steps", "40", "--train.eval-every", "40", "--train.warmup-steps", "4", "--train.lr", "5e-3"]
    assert main(["train", "recipes/audio_language.toml", *SMALL, *short]) == 0
    lines = Path("runs/audio_language/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (evaluated,) = (line for line in map(json.loads, lines) if line["event"] == "evaluated")
    assert evaluated["accuracy"] > 0.8
    assert main(["prove", "recipes/audio_language.toml", "--exact", *SMALL]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def write_prompt_package(path, language):
    """A Debian package of three prompts and one silence."""
    files = {}
    for place, seconds in (("hello", 0.5), ("digits/1", 0.4), ("beep", 0.1), ("silence/1", 1.0)):
        write_wav(path.parent / "one.wav", np.zeros(int(seconds * 8000)))
        raw = (path.parent / "one.wav").read_bytes()
        files[f"./usr/share/asterisk/sounds/{language}_f_Voice/{place}.wav"] = raw
    write_package(path, files)


def write_package(path, files):
    """A Debian package with these files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, raw in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    parts = {"debian-binary": b"2.0", "control.tar.xz": b"", "data.tar.xz": lzma.compress(data.getvalue())}
    headers = {
        name: f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(raw):<10}`\n".encode() for name, raw in parts.items()
    }
    path.write_bytes(
        b"!<arch>\n" + b"".join(headers[name] + raw + b"\n" * (len(raw) % 2) for name, raw in parts.items())
    )


def test_prompts_come_out_of_packages(tmp_path, monkeypatch):
    fetch = load_recipe("fetch_prompts")
    packages = {language: tmp_path / fetch.NAME.format(language) for language in PITCHES}
    for language, path in packages.items():
        write_prompt_package(path, language)
    texts = gzip.compress(b"; Sounds\n\nhello: Hello.  Press 1 to dial #!\ndigits/1: one\nbeep: [a tone]\n")
    write_package(tmp_path / fetch.TEXTS, {"./usr/share/doc/core-sounds-en.txt.gz": texts})
    with pytest.raises(SystemExit, match="download this version of it"):
        fetch.main(tmp_path, tmp_path / "out")
    hashes = {language: hashlib.sha256(path.read_bytes()).hexdigest() for language, path in packages.items()}
    monkeypatch.setattr(fetch, "HASHES", hashes)
    monkeypatch.setattr(fetch, "TEXTS_HASH", hashlib.sha256((tmp_path / fetch.TEXTS).read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "EVERY", 2)
    fetch.main(tmp_path, tmp_path / "out")
    lists = {split: (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "validation")}
    held_out = [json.loads(line)["audio"] for line in lists["validation"]]
    assert held_out == [f"{language}/hello.wav" for language in PITCHES]
    assert [json.loads(line)["audio"] for line in lists["train"]] == [
        f"{language}/digits-1.wav" for language in PITCHES
    ]
    first = {"audio": "en/digits-1.wav", "language": "en", "seconds": 0.4, "text": "one"}
    assert json.loads(lists["train"][0]) == first
    said = [json.loads(line).get("text") for line in lists["validation"]]
    assert said == ["hello press one to dial pound", None, None, None, None]
    assert [fetch.write_out(text) for text in ("[a tone]", "dial 500", "O'Clock...", "version 1.2")] == [
        "", "", "o'clock", "",
    ]  # fmt: skip
