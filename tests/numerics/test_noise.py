"""Random numbers by place: what they depend on, and how they are distributed."""

import math
from dataclasses import replace

import pytest
import torch

from superstep.errors import ConfigError
from superstep.kernels.philox import WORDS, reference
from superstep.numerics.noise import EVALUATION, CurrentNoise, HeldElements, Noise, SamplePlace, to_uniform

PLACE = SamplePlace(seed=3, step=7, sample=4, is_training=True)
ONES = torch.ones(2, 1000)


def dropped(place=PLACE, name="drop", prefix="block.0.", x=ONES, **options):
    return Noise(place, prefix).dropout(name, x, 0.5, **options)


def test_a_mask_belongs_to_its_place():
    assert torch.equal(dropped(), dropped())
    others = [
        dropped(replace(PLACE, seed=4)),
        dropped(replace(PLACE, step=8)),
        dropped(replace(PLACE, sample=6)),
        dropped(name="other"),
        dropped(prefix="block.1."),
    ]
    for other in others:
        # As two fair coins that know nothing of each other: equal half of the time, six standard deviations wide.
        assert abs(int((other == dropped()).sum()) - 1000) < 6 * math.sqrt(2000) / 2


def test_samples_have_the_same_numbers_in_any_microbatch():
    later = dropped(replace(PLACE, sample=5), x=ONES[:1])
    assert torch.equal(dropped()[1:], later)


def test_a_name_that_is_used_again_has_other_numbers():
    noise = Noise(PLACE)
    first, again = noise.dropout("drop", ONES, 0.5), noise.dropout("drop", ONES, 0.5)
    assert not torch.equal(first, again)
    once_more = Noise(PLACE)
    assert torch.equal(once_more.dropout("drop", ONES, 0.5), first)
    assert torch.equal(once_more.dropout("drop", ONES, 0.5), again)


def test_evaluation_drops_nothing_and_draws_the_same():
    assert Noise(EVALUATION).dropout("drop", ONES, 0.5) is ONES
    assert Noise(PLACE).dropout("drop", ONES, 0.0) is ONES
    assert torch.equal(Noise(EVALUATION).uniform("u", ONES), Noise(EVALUATION).uniform("u", ONES))
    assert not torch.equal(
        Noise(EVALUATION).uniform("u", ONES), Noise(SamplePlace(is_training=True)).uniform("u", ONES)
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_shares_a_draw_is_dropped_together(dims):
    x = torch.ones(300, 4, 3, 5)
    found = dropped(x=x, dims=dims).flatten(dims)
    assert torch.equal(found, found[..., :1].expand_as(found))
    kept = found[..., 0] > 0
    assert abs(int(kept.sum()) - kept.numel() / 2) < 6 * math.sqrt(kept.numel()) / 2


def test_a_part_has_the_numbers_of_the_whole():
    x = torch.ones(2, 6, 8)
    held = HeldElements(torch.arange(6) * 8 + 4, 4)
    part = Noise(PLACE, held=lambda name, shape, device: held)
    whole = Noise(PLACE)
    assert torch.equal(part.dropout("drop", x[..., 4:], 0.5), whole.dropout("drop", x, 0.5)[..., 4:])
    assert torch.equal(part.uniform("u", x[..., 4:]), whole.uniform("u", x)[..., 4:])
    assert torch.equal(part.normal("n", x[..., 4:]), whole.normal("n", x)[..., 4:])


def test_samples_come_first():
    noise = Noise(PLACE, "block.0.", samples=2)
    with pytest.raises(ConfigError, match=r"'block.0.drop' draws for a tensor \[1000, 2\] in a microb"):
        noise.dropout("drop", ONES.T, 0.5)


def test_numbers_between_zero_and_one():
    ends = to_uniform(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)).double()
    assert ends.tolist() == [2**-24, 1 - 2**-24, 0.5 - 2**-24, 0.5 + 2**-24]
    draws = Noise(PLACE).uniform("u", torch.empty(4, 250_000)).double().flatten()
    words = reference(PLACE.counter("u"), torch.tensor([0]), 4, 250_000).flatten()
    assert torch.equal(draws, ((words // 512) + 0.5).double() / 2**23)
    assert words.max() < WORDS
    share = torch.histc(draws, 20, 0, 1) / len(draws)
    assert (share - 0.05).abs().max() < 6 * math.sqrt(0.05 * 0.95 / len(draws))


def test_normal_numbers():
    x = Noise(PLACE).normal("n", torch.empty(4, 250_000)).double().flatten()
    error = 6 / math.sqrt(len(x))
    assert abs(float(x.mean())) < error
    assert abs(float((x**2).mean()) - 1) < error * math.sqrt(2)
    assert abs(float((x**4).mean()) - 3) < error * math.sqrt(96)
    assert abs(float((x < 1).double().mean()) - 0.8413447) < error / 2
    assert x.isfinite().all()


def test_the_current_noise_ends_with_its_forward():
    current, noise = CurrentNoise(), Noise(PLACE)

    def fail():
        with current.during(noise):
            assert current.noise is noise
            raise ValueError("ends")

    with pytest.raises(ValueError, match="ends"):
        fail()
    assert current.noise is None
