"""With a document mask ``prove`` sees a fault in it, though no document of the corpus ends in its batches."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import small
from corpus import write_corpus
from superstep.comm.device import Device
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import stream_of
from superstep.engine.attention import choose_attention
from superstep.launch.ranks import World
from superstep.numerics.loss import IGNORE
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.ignored_targets import Ragged, documents_begun
from superstep.train.proof.proof_inputs import Cases, prove_case, write_compared_lines

pytestmark = pytest.mark.multiproc

LAYOUTS = {
    "dp": {"dp": 2, "zero": 1},
    "ring": {"cp": 2},
    "bf16": {"dp": 2, "zero": 2, "compute": "bf16"},
}


def _no_mask():
    inner = choose_attention.build_sight

    def build(*args):
        across = inner(*args)(None)
        return lambda starts: across

    return mock.patch("superstep.engine.build.build_sight", build)


def _positions_alone():
    """Positions begin anew in each document, and attention goes on."""
    inner = choose_attention.build_sight

    def build(*args):
        inside = inner(*args)
        return lambda starts: replace(inside(starts), attend=inside(None).attend)

    return mock.patch("superstep.engine.build.build_sight", build)


FAULTS = {"no mask": _no_mask, "attention goes on": _positions_alone}


def _run(**plan):
    return resolve(small.config(layers=1, masked=True, **plan))


def _prove_each(rank, world, pairs):
    found = []
    for fault, case in pairs:
        with (
            FAULTS[fault]()
            if fault
            else mock.patch.object(choose_attention, "build_sight", choose_attention.build_sight)
        ):
            found.append(prove_case(World(rank, world, Device("cpu")), case))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents far longer than what a proof reads."""
    return write_corpus(tmp_path_factory.mktemp("long") / "corpus", vocab=small.VOCAB, tokens=(4000, 4000))


def test_faults_of_the_mask_are_caught_where_no_document_ends(pool, corpus, tmp_path):
    torch.set_num_threads(1)
    pairs, expected = [], []
    for name, plan in LAYOUTS.items():
        run = _run(**plan)
        compute = run.config.numerics.compute
        stream = stream_of(run.config, open_corpus(corpus), "train")
        assert not any(documents_begun(stream.batch(step * 8, slice(0, 8))) for step in range(2))
        right = Cases(tmp_path / f"{name}, right", corpus, steps=2).case(run, reruns=name == "dp")
        pairs.append(("", right))
        expected.append((name, ""))
        for fault, plant in FAULTS.items():
            with plant():  # one rank in bf16 shares the fault
                case = right if compute == "fp32" else Cases(tmp_path / f"{name}, {fault}", corpus, steps=2)
                pairs.append((fault, case if compute == "fp32" else case.case(run, reruns=False)))
            expected.append((name, fault))
    verdicts = pool.run(2, _prove_each, pairs, timeout_s=300)[0]
    found = {both: verdict.is_proven for both, verdict in zip(expected, verdicts, strict=True)}
    assert found == {both: not both[1] for both in expected}
    case, verdict = pairs[0][1], verdicts[0]
    begun = sum(documents_begun(batch) for batch in case.batches)
    assert begun >= 2 * small.SEQUENCES
    assert any(f"{begun} documents begin" in line for line in write_compared_lines(case, verdict))


@pytest.mark.parametrize("tokens", [(4000, 4000), (3, 40)], ids=["none of their own", "documents of their own"])
def test_rows_are_divided_at_other_places_and_targets_are_counted(tmp_path, tokens):
    config = small.config(masked=True)
    stream = stream_of(config, open_corpus(write_corpus(tmp_path, vocab=small.VOCAB, tokens=tokens)), "train")
    ragged, size, length = Ragged(stream), config.train.batch_sequences, small.TOKENS
    for sample in (0, size, 3):
        whole, plain = ragged.batch(sample, slice(0, size)), stream.batch(sample, slice(0, size))
        is_first = whole.starts_BS == torch.arange(length)
        assert is_first[:, 0].all()
        assert len({tuple(row.tolist()) for row in is_first}) > size // 2
        assert (is_first[:, 1:].sum(1) >= 1).all()
        # Every bound of the stream is kept, each document has one start, and its last token no target.
        assert is_first[plain.starts_BS == torch.arange(length)].all()
        assert torch.equal(whole.starts_BS, (is_first * torch.arange(length)).cummax(dim=1).values)
        assert (whole.targets_BS[:, :-1][is_first[:, 1:]] == IGNORE).all()
        assert whole.valid_tokens == int((whole.targets_BS != IGNORE).sum())
        half = ragged.batch(sample, slice(size // 2, size))
        assert torch.equal(half.starts_BS, whole.starts_BS[size // 2 :])
        assert torch.equal(whole.tokens_BS, plain.tokens_BS)
