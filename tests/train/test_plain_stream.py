"""The plain code that streams are proven against, where it can be wrong as well: the order of an epoch."""

import numpy as np
import pytest

import small
from corpus import write_corpus
from superstep.data.shuffle import permute
from superstep.data.token_files import open_corpus
from superstep.numerics.loss import IGNORE
from superstep.train.proof.plain.plain_stream import shuffle
from superstep.train.proof.sampler import draw_fault
from superstep.train.proof.stream import plain_split


@pytest.mark.parametrize("count", [1, 2, 4, 5, 63, 64, 65, 300])
def test_an_epoch_has_each_row_once_in_the_order_of_the_stream(count):
    for seed, epoch in ((0, 0), (1, 0), (1, 3), (2**70 + 5, 1)):
        plain = [shuffle(place, count, seed, epoch) for place in range(count)]
        assert sorted(plain) == list(range(count))
        assert plain == permute(np.arange(count), count, seed=seed, epoch=epoch).tolist()


@pytest.mark.parametrize("how", [{"packed": True}, {"packed": True, "masked": True}, {"packed": False}], ids=str)
def test_rows_have_each_target_of_the_corpus_once(tmp_path, how):
    corpus = open_corpus(write_corpus(tmp_path, vocab=small.VOCAB))
    plain = plain_split(small.config(**how), corpus, "validation")
    rows = plain.rows(0, plain.count)
    found = [target for _, targets, _ in rows for target in targets if target != IGNORE]
    ids, bounds = corpus.validation.tokens, corpus.validation.bounds
    begins = set(bounds.tolist())
    is_apart = "masked" in how or not how["packed"]
    wanted = [int(ids[at]) for at in range(1, len(ids)) if not (is_apart and at in begins)]
    # Of packed rows those behind the last whole one are left out.
    assert found == wanted[: len(found)]
    assert len(wanted) - len(found) < small.TOKENS if how["packed"] else len(wanted) == len(found)
    for tokens, targets, starts in rows:
        assert {len(tokens), len(targets), len(starts)} == {small.TOKENS}
        assert all(start <= place for place, start in enumerate(starts))


def test_the_sampler_is_right():
    assert draw_fault() == ""
