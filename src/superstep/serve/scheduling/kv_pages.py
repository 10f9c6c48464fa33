"""Pages: the keys and values of a server, ``page_tokens`` positions each, counted and shared.

A page is used by the requests whose table names it, cached where nobody does but its content is known, or free. Full
pages are known by a key: a chain of SHA-256 over the tokens from the start on, begun with what else decides a key's
bits. Requests that begin alike share pages; the last, unfinished page is always a request's own.

    free queue    [ never used, ... | released longest ago, ..., released last ]      what is taken comes from the left

So the queue is the order in which cached pages are forgotten, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


def root_key(*parts: str) -> bytes:
    """Where a chain begins: what decides the keys' bits beside the tokens, such as weights, adapter and salt."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.digest()


def page_keys(root: bytes, tokens: Sequence[int], page_tokens: int, *, known: Sequence[bytes] = ()) -> list[bytes]:
    """The key of each full page of a text; the first ones may be known already."""
    keys = list(known)
    last = keys[-1] if keys else root
    for start in range(len(keys) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        last = hashlib.sha256(last + array("q", tokens[start : start + page_tokens]).tobytes()).digest()
        keys.append(last)
    return keys


class Pages:
    """Who uses which page, and what the others hold.

    Args:
        count: pages in all.
        page_tokens: positions of one page.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        self.count = count
        self.page_tokens = page_tokens
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody uses, cached ones among them."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody uses, and whose content is known."""
        return sum(1 for page in self._free if page in self._key_of)

    @property
    def used(self) -> int:
        """Pages that somebody uses."""
        return self.count - len(self._free)

    def found(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of a text's first keys, as far as they are known without a gap. Nothing is changed."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_free(self, page: int) -> bool:
        """Whether nobody uses the page."""
        return page in self._free

    def users(self, page: int) -> int:
        """Requests that use the page."""
        return self._users[page]

    def next_free(self, *, without: Iterable[int] = ()) -> Iterator[int]:
        """Free pages in the order in which they are taken. Nothing is changed."""
        kept = set(without)
        return (page for page in self._free if page not in kept)

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each of these, which keep what they hold."""
        for page in pages:
            if self._users[page] == 0:
                del self._free[page]
            self._users[page] += 1

    def take(self, pages: Iterable[int]) -> None:
        """A first user for each of these free pages, who will write to them: what they held is forgotten."""
        for page in pages:
            assert self._users[page] == 0, f"page {page} is in use"
            del self._free[page]
            self._users[page] = 1
            self._forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page of a table. The end of a text is forgotten before its beginning, and what
        nobody can find again first of all.
        """
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is released too often"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, key: bytes) -> None:
        """Say what a page holds that is full now. Where another page holds the same, that one stays known."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget_all(self) -> None:
        """No page is known any more, as after a change of the weights; used ones stay with their users."""
        self._key_of.clear()
        self._page_of.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Hold the counts against the tables of all requests.

        Raises:
            AssertionError: a page has more or fewer users than are counted, or the queue is not what nobody uses.
        """
        users = [0] * self.count
        for table in tables:
            for page in table:
                users[page] += 1
        assert users == self._users, "pages have other users than are counted"
        assert set(self._free) == {page for page, n in enumerate(users) if n == 0}, "the free queue is wrong"
        assert all(self._key_of.get(page) == key for key, page in self._page_of.items()), "a key names another page"
        assert len(self._key_of) == len(self._page_of)

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
