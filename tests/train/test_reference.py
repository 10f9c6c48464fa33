"""What judges a layout is better than what it judges, and its batches let a wrong divisor show."""

from dataclasses import replace

import pytest
import torch

import small
from corpus import write_corpus
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import stream_of
from superstep.engine import optimizer
from superstep.model.axes import units
from superstep.numerics.loss import IGNORE
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.train.proof.compare import Difference
from superstep.train.proof.ignored_targets import Ragged
from superstep.train.proof.likely_causes import hints
from superstep.train.proof.reference import reference_steps


def _large(vocab, width=64):
    config = small.config(layers=1, tied=False)
    return replace(config, model=replace(config.model, vocab=vocab, width=width))


def test_the_norm_of_a_large_vocabulary_is_summed_in_fp64():
    run = resolve(_large(2**15))
    step = next(reference_steps(run.shape, run.config.train, small.batches(steps=1)))
    square = sum(float(x.double().square().sum()) for x in step.gradients.values())
    assert step.grad_norm == pytest.approx(square**0.5, rel=1e-12)


@pytest.mark.parametrize("fill", [0.37, None], ids=["alike", "random"])
def test_the_engines_sum_of_squares_is_near_fp64_whatever_the_size(fill):
    values = torch.full((2**21 + 77,), fill or 0.0)
    if fill is None:
        values.normal_(generator=torch.Generator().manual_seed(1))
    parts = [values, values[:512], values[:5], values[:0]]
    expected = sum(float(part.double().square().sum()) for part in parts)
    assert float(optimizer._square_sum(parts, values.device)) == pytest.approx(expected, rel=1e-6)


def test_the_reference_counts_its_divisor_itself():
    run = resolve(small.config())
    (batch,) = small.batches(steps=1, packed=False)
    steps = [
        next(reference_steps(run.shape, run.config.train, [replace(batch, valid_tokens=n)]))
        for n in (batch.valid_tokens, 2 * batch.valid_tokens)
    ]
    assert steps[0].loss == steps[1].loss


def test_clipping_is_made_to_work():
    run = resolve(small.config())
    train = replace(run.config.train, clip_norm=1e3)
    step = next(reference_steps(run.shape, train, small.batches(steps=1), clips=True))
    assert step.clip_norm == pytest.approx(step.grad_norm / 4, rel=0.5)
    for name, gradient in step.gradients.items():
        left = gradient * (step.clip_norm / step.grad_norm) * (1 - train.beta1)
        torch.testing.assert_close(step.moments["exp_avg"][name], left, rtol=1e-5, atol=1e-12)


def test_ragged_rows_have_other_numbers_of_targets_and_the_count_is_right(tmp_path):
    config = small.config()
    stream = stream_of(config, open_corpus(write_corpus(tmp_path, vocab=small.VOCAB)), "train")
    ragged, size = Ragged(stream), config.train.batch_sequences
    for start in (0, size, 3):
        whole = ragged.batch(start, slice(0, size))
        counts = (whole.targets_BS != IGNORE).sum(1).tolist()
        assert len(set(counts)) == size
        assert whole.valid_tokens == sum(counts)
        half = ragged.batch(start, slice(size // 2, size))
        assert torch.equal(half.targets_BS, whole.targets_BS[size // 2 :])
        assert half.valid_tokens == whole.valid_tokens
        plain = stream.batch(start, slice(0, size)).targets_BS
        assert torch.equal(whole.targets_BS[whole.targets_BS != IGNORE], plain[whole.targets_BS != IGNORE])


def _gradients(run, ratios):
    names = [one.name for unit in units(run.shape) for p in unit.params.values() for one in p.each]
    return [
        Difference(step=0, kind="gradient", name=name, relative=abs(r - 1), allowed=2e-5, ratio=r, beside=1e-7)
        for name in dict.fromkeys(names)
        for r in [ratios(name)]
    ]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (lambda name: 0.5, ["all ", " gradients, ratio 0.500", "reduce u"]),
        (lambda name: 0.5 if "layers.1." in name else 1.0, ["ratio 0.500", "made by: reduce u2"]),
        (lambda name: 2.0 if "layers.0." in name or "embed" in name else 1.0, ["ratio 2.000", "backward u1"]),
        (lambda name: float(len(name)), ["by no common factor"]),
    ],
    ids=["all", "one unit", "below a unit", "each another"],
)
def test_what_is_wrong_is_told_by_its_factor_and_its_instructions(ratios, expected):
    run = resolve(small.config(dp=2, zero=1))
    found = _gradients(run, ratios)
    first = next(d for d in found if d.is_wrong)
    told = " | ".join(hints(first, found, compile_step(run.plan), units(run.shape)))
    for part in expected:
        assert part in told
