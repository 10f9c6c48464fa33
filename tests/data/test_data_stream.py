"""A stream is a function of seed and cursor: each sequence once an epoch, whoever reads which rows."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.data.batch import Batch
from superstep.data.shuffle import permute
from superstep.data.token_files import Corpus, CorpusManifest, Split
from superstep.data.token_stream import TokenStream
from superstep.numerics.loss import IGNORE

MANIFEST = CorpusManifest(
    format=1, fingerprint="", dtype="uint32", vocab=1 << 20, end_of_text=0, train_tokens=0, train_documents=0,
    validation_tokens=0, validation_documents=0, text_bytes=0, bytes_per_token=1.0, unigram_nats=1.0,
)  # fmt: skip

# A shared machine may stall for longer than hypothesis allows an example.
check = settings(max_examples=50)

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=20).filter(lambda found: sum(found) > 8 and max(found) > 1)


def corpus_of(document_lengths: list[int]) -> Corpus:
    """Token i of the stream has the id i + 1, so that each id is one place."""
    bounds = np.concatenate(([0], np.cumsum(document_lengths)))
    split = Split(np.arange(1, bounds[-1] + 1, dtype=np.uint32), bounds)
    return Corpus(Path(), MANIFEST, split, split)


@st.composite
def streams(draw) -> TokenStream:
    return TokenStream(
        corpus_of(draw(lengths)),
        draw(st.sampled_from(["train", "validation"])),
        sequence_tokens=draw(st.integers(1, 8)),
        packed=draw(st.booleans()),
        batch_sequences=draw(st.integers(1, 12)),
        seed=draw(st.integers(-(2**63), 2**64)),
    )


def ranks_rows(batch_sequences: int, dp: int) -> list[slice]:
    """Contiguous rows for each of dp ranks, even where dp does not divide the batch."""
    edges = [batch_sequences * rank // dp for rank in range(dp + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def read(stream: TokenStream, sample: int) -> Batch:
    return stream.batch(sample, slice(None))


@check
@given(st.integers(1, 5000), st.integers(-5, 2**64), st.integers(0, 2**40))
def test_the_permutation_is_a_bijection(length, seed, epoch):
    images = permute(np.arange(length), length, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(images), np.arange(length))


@check
@given(st.integers(2**33, 2**62), st.integers(0, 2**32))
def test_the_permutation_of_a_huge_range_stays_inside_without_meeting(length, seed):
    positions = np.concatenate([np.arange(500), np.arange(length - 500, length)])
    images = permute(positions, length, seed=seed, epoch=0)
    assert ((images >= 0) & (images < length)).all()
    assert len(np.unique(images)) == 1000


@pytest.mark.parametrize("length", [3, 5, 17])
def test_every_place_is_about_equally_likely(length):
    images = np.array([permute(np.arange(length), length, seed=s, epoch=e) for s in range(20) for e in range(50)])
    expected = len(images) / length
    freedom = length - 1
    for position in range(length):
        counts = np.bincount(images[:, position], minlength=length)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < freedom + 6 * (2 * freedom) ** 0.5  # six standard deviations


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(permute(np.arange(50), 50, seed=s, epoch=e)) for s in range(10) for e in range(10)}
    assert len(orders) == 100


@check
@given(streams(), st.integers(0, 10**6), st.integers(1, 12))
def test_the_ranks_rows_together_are_the_global_batch(stream, sample, dp):
    whole = read(stream, sample)
    parts = [stream.batch(sample, rows) for rows in ranks_rows(stream.batch_sequences, dp)]
    assert torch.equal(torch.cat([part.tokens_BS for part in parts]), whole.tokens_BS)
    assert torch.equal(torch.cat([part.targets_BS for part in parts]), whole.targets_BS)
    assert {part.valid_tokens for part in parts} == {whole.valid_tokens}
    assert sum(int((part.targets_BS != IGNORE).sum()) for part in parts) == whole.valid_tokens


@check
@given(streams())
def test_no_sequence_is_without_a_target_and_padding_has_none(stream):
    for sample in range(0, stream.sequences, stream.batch_sequences):
        batch = read(stream, sample)
        assert batch.tokens_BS.shape == batch.targets_BS.shape == (stream.batch_sequences, stream.sequence_tokens)
        assert batch.tokens_BS.dtype == batch.targets_BS.dtype == torch.int64
        has_loss = batch.targets_BS != IGNORE
        assert has_loss.any(dim=1).all()
        # Ids are places: a target is the place after its token, and padding is the end of text, 0.
        assert torch.equal(batch.targets_BS[has_loss], batch.tokens_BS[has_loss] + 1)
        assert (batch.tokens_BS[~has_loss] == 0).all()


@check
@given(lengths, st.integers(1, 8), st.integers(0, 3), st.sampled_from(["train", "validation"]))
def test_packed_each_token_is_read_once_an_epoch(document_lengths, length, epoch, split):
    stream = TokenStream(
        corpus_of(document_lengths), split, sequence_tokens=length, packed=True, batch_sequences=1, seed=1
    )
    first = epoch * stream.sequences
    rows = [read(stream, first + i).tokens_BS[0] for i in range(stream.sequences)]
    seen = torch.cat(rows)
    assert torch.equal(seen.sort().values, torch.arange(1, stream.sequences * length + 1))
    assert sum(document_lengths) - 1 - length < len(seen) <= sum(document_lengths) - 1


@check
@given(lengths, st.integers(1, 8), st.integers(0, 3))
def test_unpacked_each_target_of_each_document_is_read_once_an_epoch(document_lengths, length, epoch):
    stream = TokenStream(
        corpus_of(document_lengths), "train", sequence_tokens=length, packed=False, batch_sequences=1, seed=1
    )
    first = epoch * stream.sequences
    seen = torch.cat([read(stream, first + i).targets_BS[0] for i in range(stream.sequences)])
    starts = np.concatenate(([0], np.cumsum(document_lengths)[:-1])) + 1
    expected = set(range(1, sum(document_lengths) + 1)) - set(starts.tolist())
    assert sorted(seen[seen != IGNORE].tolist()) == sorted(expected)


@check
@given(streams(), st.integers(0, 500), st.integers(1, 12), st.integers(1, 12))
def test_resuming_on_another_dp_goes_on_with_the_same_sequences(stream, sample, dp_before, dp_after):
    def run(start: int, steps: int, dp: int) -> list[torch.Tensor]:
        return [
            torch.cat([stream.batch(start + k * stream.batch_sequences, rows).tokens_BS for rows in split])
            for k in range(steps)
            for split in [ranks_rows(stream.batch_sequences, dp)]
        ]

    resumed = run(sample, 2, dp_before) + run(sample + 2 * stream.batch_sequences, 2, dp_after)
    assert torch.equal(torch.cat(resumed), torch.cat(run(sample, 4, 1)))


@check
@given(streams(), st.integers(0, 200), st.integers(1, 12))
def test_the_order_of_samples_does_not_depend_on_the_batch(stream, sample, batch_sequences):
    def sequence(found: TokenStream, cursor: int) -> list[int]:
        return read(found, cursor).tokens_BS[0].tolist()

    batch = read(stream, sample).tokens_BS
    assert [sequence(stream, sample + row) for row in range(len(batch))] == batch.tolist()


def test_training_is_shuffled_by_the_seed_and_validation_is_in_plain_order():
    def order(split: str, seed: int, epoch: int = 0) -> list[int]:
        stream = TokenStream(corpus_of([1000]), split, sequence_tokens=10, packed=True, batch_sequences=99, seed=seed)
        return read(stream, epoch * stream.sequences).tokens_BS[:, 0].tolist()

    assert order("validation", 1) == order("validation", 2) == list(range(1, 991, 10))
    assert order("validation", 1, epoch=1) == order("validation", 1)
    shuffled = {tuple(order("train", seed, epoch)) for seed in range(5) for epoch in range(3)}
    assert len(shuffled | {tuple(order("validation", 0))}) == 16


@check
@given(lengths, st.integers(1, 8), st.integers(1, 6), st.sampled_from(["train", "validation"]), st.integers(0, 100))
def test_with_a_document_mask_starts_and_targets_are_those_of_each_document(
    document_lengths, length, batch_sequences, split, sample
):
    def stream(document_mask: bool) -> TokenStream:
        return TokenStream(
            corpus_of(document_lengths), split, sequence_tokens=length, packed=True, batch_sequences=batch_sequences,
            seed=1, document_mask=document_mask,
        )  # fmt: skip

    plain, masked = read(stream(False), sample), read(stream(True), sample)
    assert plain.starts_BS is None
    assert torch.equal(plain.tokens_BS, masked.tokens_BS)
    # Ids are places of the stream, from 1 on: the document of each token, and of the one after it.
    document = np.repeat(np.arange(len(document_lengths)), document_lengths)
    here, after = (document[ids.numpy() - 1] for ids in (masked.tokens_BS, plain.targets_BS))
    assert torch.equal(masked.targets_BS, plain.targets_BS.masked_fill(torch.from_numpy(here != after), IGNORE))
    assert masked.valid_tokens == int((here == after).sum())
    starts = [[row.tolist().index(one) for one in row] for row in here]
    assert masked.starts_BS.tolist() == starts
    assert masked.starts_BS.dtype == torch.int64
    parts = [stream(True).batch(sample, rows) for rows in ranks_rows(batch_sequences, 3)]
    assert torch.equal(torch.cat([part.starts_BS for part in parts]), masked.starts_BS)


def test_a_document_mask_has_nothing_to_keep_apart_where_each_sequence_is_of_one_document():
    stream = TokenStream(
        corpus_of([5, 9]), "train", sequence_tokens=4, packed=False, batch_sequences=2, seed=1, document_mask=True
    )
    assert read(stream, 0).starts_BS is None
