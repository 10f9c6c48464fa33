"""The recipe of AlexNet: its model, its pictures, and its two columns as two tensor-parallel ranks."""

import pytest
import torch
import torch.nn.functional as F

from emoji import COUNT, write_emoji
from recipe_files import enter_folder, load_recipe
from superstep.cli.main import main
from superstep.data.samples.noise import noise_of
from superstep.numerics.noise import EVALUATION, Noise, SamplePlace
from superstep.plan.config import ModelConfig, RunConfig


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_emoji(tmp_path / "runs" / "emoji")
    return enter_folder(tmp_path, monkeypatch)


def test_the_model_has_the_parameters_of_the_paper(here):
    """60,965,224 for 1,000 classes: 34,944 + 307,456 + 885,120 + 663,936 + 442,624 of the convolutions, 37,752,832 +
    16,781,312 + 4,097,000 of the dense layers.
    """
    units = load_recipe("alexnet").units(RunConfig())
    modules = [unit.build() for unit in units]
    numel = sum(p.numel() for module in modules for p in module.parameters())
    assert numel == 60_965_224 + 4097 * (COUNT - 1000)


def test_responses_are_normalised_over_five_maps_of_a_column():
    """Section 3.3, written out."""
    x = torch.randn(2, 12, 3, 3)
    out = load_recipe("alexnet").NormaliseResponses(12)(x)
    for number in range(12):
        first = number // 6 * 6
        maps = range(max(first, number - 2), min(first + 6, number + 3))
        scale = (2 + 1e-4 * sum(x[:, m] ** 2 for m in maps)) ** 0.75
        torch.testing.assert_close(out[:, number], x[:, number] / scale)


def test_a_picture_is_the_middle_of_the_held_out_and_any_part_of_a_trained_one(here):
    alexnet = load_recipe("alexnet")
    assert (alexnet.length("train"), alexnet.length("validation")) == (2 * COUNT, COUNT)
    read = alexnet.sample("validation", 5, noise_of(0, "validation", 0, 5))
    assert int(read["target"]) == 5
    pixels, crop = read["pixels"][None], alexnet.Crop()
    rgba = pixels.float() / 255
    whole = F.interpolate(rgba[:, :3] * rgba[:, 3:] + 1 - rgba[:, 3:], size=(256, 256), mode="bilinear") * 2 - 1
    middle = crop(pixels, Noise(EVALUATION))
    between = F.avg_pool2d(whole, 2, stride=1)[..., 14:241, 14:241]  # the middle begins half a pixel further
    assert float((middle - between).abs().mean()) < 0.01
    trained = [crop(pixels, Noise(SamplePlace(step=step, is_training=True))) for step in range(2)]
    assert trained[0].shape == (1, 3, 227, 227)
    assert not torch.equal(*trained)


@pytest.mark.multiproc
def test_two_columns_on_two_ranks_have_the_bits_of_one(here, capfd):
    small = ["--model.width", "12", "--train.batch-sequences", "4", "--plan.microbatch", "2"]
    assert main(["prove", "recipes/alexnet.toml", "--exact", *small]) == 0
    assert " 0 with other bits" in capfd.readouterr().out


def test_a_small_model_has_every_layer(here):
    (features, head) = load_recipe("alexnet").units(RunConfig(model=ModelConfig(width=12)))
    x = features.build()(torch.zeros(2, 4, 64, 64, dtype=torch.uint8), Noise(EVALUATION))
    assert head.build()(x).shape == (2, COUNT)
