"""Conversations in sequences: each whole and once, apart from its neighbours, with a loss on answers alone."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.data.packing import pack
from superstep.data.token_files import Corpus, CorpusManifest, Split
from superstep.data.token_stream import TokenStream
from superstep.numerics.loss import IGNORE

S = 12
MANIFEST = CorpusManifest(
    format=1, fingerprint="", dtype="uint32", vocab=1 << 20, end_of_text=0, train_tokens=0, train_documents=0,
    validation_tokens=0, validation_documents=0, text_bytes=0, bytes_per_token=1.0, unigram_nats=1.0, kind="answers",
)  # fmt: skip


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_item_has_one_place_and_no_two_sequences_would_fit_into_one(sizes):
    found = pack(sizes, 20)
    assert sorted(item for items in found for item in items) == list(range(len(sizes)))
    filled = sorted(sum(sizes[item] for item in items) for items in found)
    assert all(0 < fill <= 20 for fill in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 20
    assert found == sorted(map(sorted, found))


@st.composite
def conversations(draw):
    """Conversations of 2 to S + 1 tokens, each with an answer token behind its first."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        marks = draw(st.lists(st.integers(0, 1), min_size=1, max_size=S).filter(any))
        found.append([0, *marks])
    return found


def corpus_of(found, *, packed):
    """The id of each token is one more than its place among all tokens."""
    packs = pack([len(marks) - 1 for marks in found], S) if packed else [[k] for k in range(len(found))]
    ordered = [found[k] for items in packs for k in items]
    bounds = np.cumsum([0, *(len(marks) for marks in ordered)])
    firsts = np.cumsum([0, *(len(items) for items in packs)])
    answers = np.array([mark for marks in ordered for mark in marks], np.uint8)
    before = [int(answers[: bounds[first]].sum()) for first in firsts]
    split = Split(
        np.arange(1, bounds[-1] + 1, dtype=np.uint32), bounds, answers, np.stack([firsts, np.array(before)], axis=1)
    )
    return Corpus(Path(), MANIFEST, split, split), bounds, answers


@settings(max_examples=60)
@given(conversations(), st.booleans(), st.integers(1, 4), st.integers(0, 1000))
def test_each_target_is_there_once_after_what_was_before_it_in_its_conversation(found, packed, rows, seed):
    corpus, bounds, answers = corpus_of(found, packed=packed)
    stream = TokenStream(
        corpus, "train", sequence_tokens=S, packed=packed, batch_sequences=rows, seed=seed, document_mask=packed
    )
    seen = []
    for sample in range(0, stream.sequences, rows):
        batch = stream.batch(sample, slice(0, rows))
        parts = [stream.batch(sample, slice(row, row + 1)) for row in range(rows)]
        assert all(part.valid_tokens == batch.valid_tokens for part in parts), "of the whole batch, whoever reads"
        assert batch.valid_tokens == int((batch.targets_BS != IGNORE).sum())
        taken = min(rows, stream.sequences - sample)
        for row in range(taken):
            tokens, targets = batch.tokens_BS[row].tolist(), batch.targets_BS[row].tolist()
            starts = batch.starts_BS[row].tolist() if packed else [0] * S
            for place, target in enumerate(targets):
                if target == IGNORE:
                    continue
                seen.append(target)
                start = int(bounds[np.searchsorted(bounds, target - 1, side="right") - 1])
                # What the target can see is its conversation from the first token on, and nothing else.
                assert tokens[starts[place] : place + 1] == list(range(start + 1, target))
            assert all(starts[place] <= place for place in range(S))
    assert sorted(seen) == (np.flatnonzero(answers) + 1).tolist()
