"""Pages: whoever asks for what, in whatever order, every page is used, cached or free, and no key is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.serve.scheduling.kv_pages import Pages, page_keys, root_key

SIZE = 4


def keys(tokens, root=b"root"):
    return page_keys(root, tokens, SIZE)


def test_a_key_depends_on_every_token_before_and_on_the_root():
    text = list(range(12))
    whole = keys(text)
    assert len(whole) == 3 == len(set(whole))
    assert keys(text[:11]) == whole[:2], "an unfinished page has no key"
    for place in range(12):
        other = [*text[:place], 99, *text[place + 1 :]]
        assert [a == b for a, b in zip(keys(other), whole, strict=True)] == [page < place // SIZE for page in range(3)]
    assert not set(keys(text, b"another root")) & set(whole)


def test_keys_go_on_from_those_that_are_known():
    text = list(range(40))
    assert page_keys(b"root", text, SIZE, known=keys(text[:17])) == keys(text)


@pytest.mark.parametrize("other", [("w2", "", ""), ("w1", "a", ""), ("w1", "", "s"), ("w1a", "", "")])
def test_weights_adapter_and_salt_keep_texts_apart(other):
    assert root_key("w1", "", "") != root_key(*other)


def test_parts_of_a_root_do_not_run_together():
    assert root_key("ab", "c") != root_key("a", "bc")


def test_the_least_recently_released_page_is_taken_first_and_a_texts_end_before_its_beginning():
    pages = Pages(6, SIZE)
    for text, table in (("one", [0, 1, 2]), ("two", [3, 4])):
        pages.take(table)
        for page, key in zip(table, keys([ord(text[0])] * 12), strict=False):
            pages.publish(page, key)
    pages.release([0, 1, 2])
    pages.release([3, 4])
    assert list(pages.next_free()) == [5, 2, 1, 0, 4, 3], "never used, then by age"
    assert (pages.free, pages.cached, pages.used) == (6, 5, 0)


def test_what_nobody_can_find_again_is_taken_first():
    pages = Pages(3, SIZE)
    pages.take([0, 1])
    pages.publish(0, b"known")
    pages.release([0, 1])
    assert list(pages.next_free()) == [1, 2, 0]


def test_a_page_that_is_taken_is_no_longer_found():
    pages = Pages(2, SIZE)
    (key,) = keys([1, 2, 3, 4])
    pages.take([0])
    pages.publish(0, key)
    pages.release([0])
    assert pages.lookup([key]) == [0]
    pages.take([0])
    assert pages.lookup([key]) == []


def test_a_gap_ends_what_is_found():
    pages = Pages(3, SIZE)
    known = keys(list(range(12)))
    pages.take([0, 1, 2])
    for page in (0, 2):
        pages.publish(page, known[page])
    assert pages.lookup(known) == [0]


def test_forgetting_keeps_users():
    pages = Pages(2, SIZE)
    pages.take([0, 1])
    pages.publish(0, b"a")
    pages.release([0])
    pages.forget_all()
    assert (pages.free, pages.cached, pages.used) == (1, 0, 1)
    assert pages.lookup([b"a"]) == []


def test_a_page_cannot_be_taken_from_its_user_nor_released_twice():
    pages = Pages(2, SIZE)
    pages.take([0])
    with pytest.raises(AssertionError, match="page 0 is in use"):
        pages.take([0])
    pages.release([0])
    with pytest.raises(AssertionError, match="released too often"):
        pages.release([0])


@given(st.data())
@settings(max_examples=200)
def test_whoever_asks_for_what_the_counts_hold(data):
    """A model of the pages in a few lines: who holds which text, and what was ever written where."""
    pages = Pages(data.draw(st.integers(1, 8)), SIZE)
    texts = [[letter] * 4 * n for letter in (1, 2) for n in (1, 2, 3)] + [[1] * 8 + [2] * 4]
    tables, written = [], {}
    for _ in range(data.draw(st.integers(1, 40))):
        if tables and data.draw(st.booleans()):
            pages.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        else:
            wanted = keys(data.draw(st.sampled_from(texts)))
            found = pages.lookup(wanted)
            assert [written[page] for page in found] == wanted[: len(found)], "a page holds what its key says"
            fresh = list(pages.next_free(without=found))[: len(wanted) - len(found)]
            if len(fresh) < len(wanted) - len(found):
                continue
            pages.share(found)
            pages.take(fresh)
            for page, key in zip(fresh, wanted[len(found) :], strict=True):
                written[page] = key
                pages.publish(page, key)
            tables.append([*found, *fresh])
        pages.check(tables)
        assert pages.used == len({page for table in tables for page in table})
        assert pages.free + pages.used == pages.count
        assert pages.cached <= pages.free
