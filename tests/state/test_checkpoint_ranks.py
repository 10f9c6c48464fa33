"""Checkpoints of several ranks: what one cannot write stops all, and no page is written through two page caches."""

import errno
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

import saved
from pool import RankError
from superstep.comm.objects import gather
from superstep.errors import ConfigError, Fault, StateError
from superstep.state import checkpoint, checkpoint_writer, file_shares
from superstep.state.all_or_none import together
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at, checkpoints, prune
from superstep.state.file_shares import page_cache
from superstep.state.manifest import Position

PAGE = 4096
SHAPES = {"a": (50, 100), "b": (3000,), "c": (64, 64), "scale": (), "d": (7, 700)}


class Caches:
    """Page caches as network file systems have them: each writes back whole pages of what it last knew of a file.

    A host learns what the others have written where all ranks meet: there files are opened anew.
    """

    def __init__(self, folder, hosts):
        self.folder = folder
        self.hosts = hosts
        self.rank = threading.local()
        self._known = {}
        self._pages = {}
        self._dirty = {}
        self._handles = {}
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "close")}

    def host(self):
        return self.hosts[self.rank.number]

    def meet(self, rank):
        if rank == 0:
            self._pages.clear()
            self._known = {str(path): path.read_bytes() for path in self.folder.glob("*.partial/*.safetensors")}

    def open(self, path, flags, *rest, **more):
        handle = self._real["open"](path, flags, *rest, **more)
        if str(path).endswith(".safetensors") and flags & os.O_RDWR:
            self._handles[handle] = self.host(), str(path)
        return handle

    def pwrite(self, handle, data, offset):
        if handle not in self._handles:
            return self._real["pwrite"](handle, data, offset)
        with self._lock:
            key = self._handles[handle]
            if key not in self._pages:
                self._pages[key] = bytearray(self._known[key[1]])
            self._pages[key][offset : offset + len(data)] = data
            self._dirty.setdefault(key, set()).update(range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1))
        return len(data)

    def fsync(self, handle):
        if handle in self._handles:
            with self._lock:
                key = self._handles[handle]
                for page in self._dirty.pop(key, ()):
                    self._real["pwrite"](handle, self._pages[key][PAGE * page : PAGE * (page + 1)], PAGE * page)
        self._real["fsync"](handle)

    def close(self, handle):
        if handle in self._handles:
            self.fsync(handle)
            del self._handles[handle]
        self._real["close"](handle)


def _save_through(folder, hosts, owner_of, *, cache):
    """Save through the caches of these hosts; for each piece, ``owner_of`` says which rank has it."""
    caches = Caches(folder, hosts)

    def one(peers):
        caches.rank.number = peers.rank
        mine = saved.pieces(saved.truth, shapes=SHAPES, cuts=2, runs=3)
        mine = [piece for number, piece in enumerate(mine) if owner_of[number] == peers.rank]
        tensors = dict.fromkeys(saved.STATE, SHAPES)
        return save(checkpoint_at(folder, 1), mine, Position(step=1), peers, tensors=tensors, beside={})

    with (
        mock.patch.multiple(os, open=caches.open, pwrite=caches.pwrite, fsync=caches.fsync, close=caches.close),
        mock.patch.multiple(file_shares, GRANULE=PAGE, STRETCH=2 * PAGE),
        mock.patch.object(
            checkpoint_writer, "SHORT_BYTES", 0
        ),  # these caches see no maps, which only ranks of one cache use
        mock.patch.object(checkpoint, "page_cache", side_effect=lambda _: cache(caches.host())),
    ):
        found = saved.on_threads(len(hosts), one, caches.meet)
    assert len(set(found)) == 1, found
    assert isinstance(found[0], int), found
    return checkpoint_at(folder, 1)


def _is_torn(place):
    try:
        stored = load_file(place / "model.safetensors") | load_file(place / "optimizer.safetensors")
    except SafetensorError:
        return True
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    )
    load(place, saved.pieces(saved.zeros, shapes=SHAPES), saved.Alone())
    return any(
        not torch.equal(stored[name if kind == "weight" else f"{kind}.{name}"], saved.truth(kind, name, shape))
        for kind in saved.STATE
        for name, shape in SHAPES.items()
    )


PIECES = len(saved.pieces(saved.zeros, shapes=SHAPES, cuts=2, runs=3))


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_page_is_torn_however_ranks_lie_on_hosts(tmp_path_factory, data):
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=4))
    owner_of = data.draw(st.lists(st.integers(0, len(hosts) - 1), min_size=PIECES, max_size=PIECES))
    folder = tmp_path_factory.mktemp("shared")
    assert not _is_torn(_save_through(folder, hosts, owner_of, cache=str))


def test_the_caches_of_these_tests_tear_pages_that_two_hosts_write(tmp_path):
    """What the property above would look like without a rule: both hosts take all pages for theirs."""
    owner_of = [number % 2 for number in range(PIECES)]
    assert _is_torn(_save_through(tmp_path, [0, 1], owner_of, cache=lambda host: "one"))


def test_ranks_of_one_host_hand_nothing_over(tmp_path):
    owner_of = [number % 3 for number in range(PIECES)]
    with mock.patch("superstep.state.checkpoint_writer.Writer._pack", side_effect=AssertionError):
        assert not _is_torn(_save_through(tmp_path, [0, 0, 0], owner_of, cache=str))


def test_a_page_cache_has_one_name(tmp_path):
    (tmp_path / "sub").mkdir()
    assert page_cache(tmp_path) == page_cache(tmp_path / "sub")
    assert page_cache(tmp_path) != page_cache(Path("/proc"))


@given(st.data())
@settings(max_examples=60)
def test_every_shared_byte_has_one_owner_among_those_who_have_it(data):
    ranks = data.draw(st.integers(1, 5))
    low = st.integers(0, 40 * file_shares.GRANULE)
    claims = [
        file_shares.Claim(
            cache=str(data.draw(st.integers(0, 2))),
            ranges={
                "f": file_shares.granules(
                    [(at, at + data.draw(st.integers(1, 9 * file_shares.GRANULE))) for at in found]
                )
            },
        )
        for found in data.draw(st.lists(st.lists(low, max_size=3), min_size=ranks, max_size=ranks))
    ]
    with mock.patch.object(file_shares, "STRETCH", 2 * file_shares.GRANULE):
        found = file_shares.share_out(claims)
    for granule in range(0, 50 * file_shares.GRANULE, file_shares.GRANULE):
        writers = set()
        inside = [rank for rank, claim in enumerate(claims) if any(lo <= granule < hi for lo, hi in claim.ranges["f"])]
        for rank in inside:
            parts = list(found.parts(rank, "f", granule + 4, granule + 8))
            assert [part[:2] for part in parts] == [(granule + 4, granule + 8)]
            assert parts[0][2] in inside
            writers.add(claims[parts[0][2]].cache)
        assert len(writers) <= 1, "one page cache writes a page"
    for rank in range(ranks):
        parts = list(found.parts(rank, "f", 5, 45 * file_shares.GRANULE + 3))
        assert [a[1] for a in parts[:-1]] == [b[0] for b in parts[1:]]
        assert (parts[0][0], parts[-1][1]) == (5, 45 * file_shares.GRANULE + 3)


# What goes wrong on one rank stops all of them, with one message.


ERRORS = {
    "a user's": (ConfigError("no"), ConfigError, "no"),
    "a fault": (Fault("broken", step=3), Fault, "rank 1, step 3: broken"),
    "a fault elsewhere": (Fault("broken", rank=7), Fault, "rank 7: broken"),
    "any other": (KeyError("x"), Fault, "rank 1: described 'x'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_first_error_is_everyones(name):
    error, kind, text = ERRORS[name]

    def one(peers):
        def work():
            if peers.rank:
                raise error if peers.rank == 1 else RuntimeError("a later rank's")
            return peers.rank

        return together(peers, work, lambda error: Fault(f"described {error}"), int)

    found = saved.on_threads(3, one)
    assert [type(answer) for answer in found] == [kind] * 3
    assert [str(answer) for answer in found] == [text] * 3


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int

    def gather(self, value, form):
        return gather(value, form)


def _mine(rank, world, fill=saved.truth):
    return [piece for number, piece in enumerate(saved.pieces(fill)) if number % world == rank]


def _save(folder, step, pieces, peers):
    tensors = dict.fromkeys(saved.STATE, saved.SHAPES)
    save(checkpoint_at(Path(folder), step), pieces, Position(step=step), peers, tensors=tensors, beside={"a.txt": "a"})


def _break(what):
    """A patch under which rank 1 fails in one step of a save."""

    def fail(*args, **rest):
        raise what

    targets = {
        "pieces": (checkpoint, "entry"),
        "claim": (checkpoint, "page_cache"),
        "write": (os, "pwrite"),
        "hash": (checkpoint, "digest_of"),
    }
    return {name: mock.patch.object(*target, fail) for name, target in targets.items()}


def _fail_each_step(rank, world, folder):
    """What each rank hears, and how long it waits for it, where rank 1 fails in a step of a save or of a load."""
    peers = Ranks(rank, world)
    _save(folder, 1, _mine(rank, world), peers)
    heard = []
    for what in (OSError(errno.EIO, "Input/output error"), RuntimeError("CUDA error: planted")):
        for name, patch in _break(what).items():
            start_s = time.monotonic()
            try:
                if rank == 1:
                    with patch:
                        _save(folder, 2, _mine(rank, world), peers)
                else:
                    _save(folder, 2, _mine(rank, world), peers)
            except Fault as fault:
                heard.append((name, str(fault), time.monotonic() - start_s))
    target = _mine(rank, world, saved.zeros)
    try:
        with mock.patch.object(os, "preadv", side_effect=OSError(errno.EIO, "planted") if rank == 1 else os.preadv):
            load(checkpoint_at(Path(folder), 1), target, peers)
    except StateError as error:
        heard.append(("load", str(error), 0.0))
    assert load(checkpoint_at(Path(folder), 1), target, peers).step == 1
    wanted = _mine(rank, world)
    assert all(torch.equal(a.values, b.values) for a, b in zip(target, wanted, strict=True))
    return heard


@pytest.mark.multiproc
def test_a_rank_that_fails_stops_all_and_costs_nothing(pool, tmp_path):
    here, there = pool.run(2, _fail_each_step, str(tmp_path), timeout_s=60)
    assert len(here) == 9
    for (name, mine, wait_s), (_, theirs, _) in zip(here, there, strict=True):
        assert mine == theirs, name
        if name != "load":
            assert mine.startswith("rank 1: the checkpoint cannot be written, and older ones are untouched: "), mine
            assert "Input/output error" in mine or "RuntimeError: CUDA error: planted" in mine
            assert wait_s < 30
    assert "cannot be read ([Errno 5] planted)" in here[-1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"], "nothing half-written stays"


def _die_in_mid_save(rank, world, folder):
    peers = Ranks(rank, world)
    with mock.patch.object(os, "pwrite", lambda *args: os._exit(9) if rank == 1 else len(args[1])):
        _save(folder, 2, _mine(rank, world), peers)


@pytest.mark.multiproc
def test_a_rank_that_dies_in_mid_save_leaves_the_checkpoint_before(pool, tmp_path):
    saved.write(tmp_path, 1)
    with pytest.raises(RankError, match="rank 1 died with exit status 9"):
        pool.run(2, _die_in_mid_save, str(tmp_path), timeout_s=60)
    assert (tmp_path / "step-000002.partial").is_dir()
    assert [place.name for place in checkpoints(tmp_path)] == ["step-000001"]
    assert load(checkpoint_at(tmp_path, 1), saved.pieces(saved.zeros), saved.Alone()).step == 1
    saved.write(tmp_path, 3)
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]
