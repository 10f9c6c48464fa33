"""Pages of the KV cache, ``page_tokens`` positions each, with reference counts and a prefix cache.

A page is used by the requests with it in their block tables; or cached, if no request uses it but its key is known; or
free. The key of a full page is a chain of SHA-256 over the tokens from the start on, seeded with everything else that
decides the bits of the keys. Requests with a common prefix share pages; the last, partial page is never shared.

    free queue    [ never used, ... | released longest ago, ..., released last ]      pages are taken from the left

So the queue is the eviction order of cached pages, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


def root_key(*parts: str) -> bytes:
    """Seed of a chain: what decides the keys' bits besides the tokens, such as weights, adapter and salt."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.digest()


def page_keys(root: bytes, tokens: Sequence[int], page_tokens: int, *, known: Sequence[bytes] = ()) -> list[bytes]:
    """The key of each full page of a text; ``known`` are its first keys."""
    keys = list(known)
    last = keys[-1] if keys else root
    for start in range(len(keys) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        last = hashlib.sha256(last + array("q", tokens[start : start + page_tokens]).tobytes()).digest()
        keys.append(last)
    return keys


class Pages:
    """Reference counts and keys of all pages.

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
        """Number of unused pages, cached ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of unused pages in the prefix cache."""
        return sum(1 for page in self._free if page in self._key_of)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.count - len(self._free)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest cached prefix. Read-only."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_free(self, page: int) -> bool:
        """Whether no request uses the page."""
        return page in self._free

    def users(self, page: int) -> int:
        """Number of requests that use the page."""
        return self._users[page]

    def next_free(self, *, without: Iterable[int] = ()) -> Iterator[int]:
        """Free pages in the order of their use. Read-only."""
        kept = set(without)
        return (page for page in self._free if page not in kept)

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each page; contents stay."""
        for page in pages:
            if self._users[page] == 0:
                del self._free[page]
            self._users[page] += 1

    def take(self, pages: Iterable[int]) -> None:
        """Allocate free pages for writing: their keys leave the prefix cache."""
        for page in pages:
            assert self._users[page] == 0, f"page {page} is in use"
            del self._free[page]
            self._users[page] = 1
            self._forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from each page of a block table. The end of a text is evicted before its beginning, and
        uncached pages first of all.
        """
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is released too often"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, key: bytes) -> None:
        """Add a full page to the prefix cache. If another page has the same key, that one stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget_all(self) -> None:
        """Empty the prefix cache, as after an update of the weights; users keep their pages."""
        self._key_of.clear()
        self._page_of.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the reference counts against the block tables of all requests.

        Raises:
            AssertionError: a count is wrong, or the free queue differs from the unused pages.
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
