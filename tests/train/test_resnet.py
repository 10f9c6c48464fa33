"""The recipe of ResNet: its models, its distorted pictures, and the script that takes emoji out of packages."""

import functools
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from emoji import COUNT, write_emoji
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.idx import read_idx
from superstep.data.samples.noise import noise_of
from superstep.numerics.loss import SmoothedCrossEntropy
from superstep.numerics.noise import EVALUATION, Noise, SamplePlace
from superstep.plan.config import ModelConfig, RunConfig


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_emoji(tmp_path / "runs" / "emoji")
    return enter_folder(tmp_path, monkeypatch)


def build(depth):
    """The modules of a depth, and the numbers of their trained parameters."""
    config = RunConfig(model=ModelConfig(layers=depth))
    modules = [unit.build() for unit in load_recipe("resnet").units(config)]
    trained = [p for m in modules for name, p in m.named_parameters() if "running" not in name]
    return modules, sum(p.numel() for p in trained)


def test_the_models_have_the_parameters_of_the_paper(here):
    """11,689,512 and 44,549,160 for 1,000 classes, as every implementation of table 1 has them; here for others, and
    for a fourth channel, opacity.
    """
    fourth = 64 * 7 * 7
    (*modules, head), numel = build(18)
    assert numel == 11_689_512 + fourth + 513 * (COUNT - 1000)
    x = modules[0](torch.zeros(2, 4, 64, 64), Noise(EVALUATION))
    sizes = [tuple((x := block(x)).shape[1:]) for block in modules[1:]]
    assert sizes[1::2] == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert head(x).shape == (2, COUNT)
    assert build(101)[1] == 44_549_160 + fourth + 2049 * (COUNT - 1000)


def test_pictures_of_two_makers_are_distorted_by_their_place_and_the_third_makers_are_not(here):
    resnet = load_recipe("resnet")
    assert (resnet.length("train"), resnet.length("validation")) == (2 * COUNT, COUNT)
    of_twitter = resnet.sample("train", COUNT + 5, noise_of(0, "train", 0, 0))
    assert int(of_twitter["target"]) == 5
    assert torch.equal(of_twitter["pixels"], read_idx("runs/emoji/twitter.idx")[5])
    pixels, distort = of_twitter["pixels"].expand(4, -1, -1, -1), functools.partial(resnet.distort, size=64)

    def drawn(step, first=0, rows=pixels):
        return distort(rows, Noise(SamplePlace(step=step, sample=first, samples=4, is_training=True)))

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    torch.testing.assert_close(drawn(0)[2:], drawn(0, 2, pixels[2:]))
    held_out = resnet.sample("validation", 5, noise_of(0, "validation", 0, 5))["pixels"]
    assert torch.equal(held_out, read_idx("runs/emoji/facebook.idx")[5])


def test_a_picture_is_cut_to_what_is_drawn_wherever_its_maker_puts_it():
    """A block of 16 x 16 fills the net's input: its four colours are the input's quarters."""
    distort = functools.partial(load_recipe("resnet").distort, size=64)
    picture = torch.zeros(2, 4, 64, 64, dtype=torch.uint8)
    block = torch.tensor([[0, 255], [100, 200]], dtype=torch.uint8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    for number, (top, left) in enumerate(((0, 48), (21, 7))):
        picture[number, :, top : top + 16, left : left + 16] = block
        picture[number, 3, top : top + 16, left : left + 16] = 255
    pixels = distort(picture, Noise(EVALUATION))
    torch.testing.assert_close(pixels[0], pixels[1])
    middles = pixels[0, 0, 16::32, 16::32]
    torch.testing.assert_close(middles, torch.tensor([[0, 255], [100, 200]]) / 255 * 2 - 1)
    assert torch.equal(pixels[:, 3, 8:-8, 8:-8], torch.ones(2, 48, 48))


def test_smoothed_targets_have_the_loss_of_the_paper_and_an_accuracy():
    """Section 7 of Szegedy 2016: the cross entropy with (1 - share) of a class and a share of the uniform."""
    logits, targets = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 2, 1])
    log_p, kept = logits.log_softmax(-1), targets >= 0
    right = log_p.gather(1, targets.clamp(0)[:, None])[:, 0]
    expected = -(0.9 * right + 0.1 * log_p.mean(-1))[kept].sum()
    torch.testing.assert_close(SmoothedCrossEntropy(0.1)(logits, targets), expected)


@pytest.mark.long
def test_the_recipe_learns_and_its_layout_is_proven_bit_by_bit(here, capfd):
    flags = [
        "--train.steps",
        "12",
        "--train.warmup-steps",
        "2",
        "--train.eval-batches",
        "1",
        "--state.save-every",
        "12",
    ]
    assert main(["train", "recipes/resnet18.toml", *flags]) == 0
    lines = [json.loads(line) for line in Path("runs/resnet18/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["accuracy"] >= 0 for line in lines if line["event"] == "evaluated"]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
    assert main(["prove", "recipes/resnet18.toml", "--exact"]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def package(path, maker, pictures):
    table = [
        {"image": f"{name}.png", "sort_order": order, "category": category}
        | {"has_img_google": True, "has_img_twitter": name != "c", "has_img_facebook": 1}
        for order, (name, category) in enumerate({"b": "Symbols", "a": "Flags", "c": "Activities"}.items())
    ]
    files = {"package/emoji.json": json.dumps(table).encode()}
    for name, colour in pictures.items():
        data = io.BytesIO()
        Image.new("RGBA", (64, 64), colour).save(data, "png")
        files[f"package/img/{maker}/64/{name}"] = data.getvalue()
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_emoji_that_all_makers_drew_come_out_of_packages_in_order(tmp_path, monkeypatch):
    fetch = load_recipe("fetch_emoji")
    for nth, maker in enumerate(fetch.PACKAGES):
        colours = {"a.png": (nth, 0, 0, 255), "b.png": (nth, 9, 0, 128), "c.png": (1, 1, 1, 1)}
        package(tmp_path / f"emoji-datasource-{maker}-16.0.0.tgz", maker, colours)
    with pytest.raises(SystemExit, match="it is another file"):
        fetch.main(tmp_path, tmp_path / "out")
    hashes = {
        maker: hashlib.sha256((tmp_path / f"emoji-datasource-{maker}-16.0.0.tgz").read_bytes()).hexdigest()
        for maker in fetch.PACKAGES
    }
    monkeypatch.setattr(fetch, "PACKAGES", hashes)
    fetch.main(tmp_path, tmp_path / "out")
    for nth, maker in enumerate(fetch.PACKAGES):
        pixels = read_idx(tmp_path / "out" / f"{maker}.idx")
        assert pixels.shape == (2, 4, 64, 64)
        assert pixels[:, :, 0, 0].tolist() == [[nth, 9, 0, 128], [nth, 0, 0, 255]]
    assert read_idx(tmp_path / "out" / "categories.idx").tolist() == [1, 0]
