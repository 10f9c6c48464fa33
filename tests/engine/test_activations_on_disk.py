"""Activations on a disk: the bits of a run that keeps them in memory, its memory as predicted, and planted faults."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import small
from bench.alive import Born, Watch
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.activations import unit_bytes
from superstep.engine.activations import direct_file
from superstep.engine.activations.copiers import DiskCopier
from superstep.engine.activations.direct_file import BLOCK, BUFFER, DirectFile
from superstep.engine.activations.offloader import Offloader
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.errors import ConfigError, DiskFault
from superstep.model.axes import units
from superstep.plan.config import StateConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.check_offload import check_copies
from superstep.program.instructions import Offload
from superstep.program.peak_memory import list_held_bytes
from superstep.program.timeline import Timeline, TimelineEvent

DISK = {"activations": ("disk",)}


@pytest.fixture
def folder():
    """On a disk: a temporary folder may lie in memory."""
    place = Path(__file__).parent / "offloaded"
    place.mkdir(exist_ok=True)
    yield place
    place.rmdir()  # fails if a file is left


class Rank:
    """One rank of a small model."""

    def __init__(self, folder, **layout):
        config = small.config(layers=6, **{"microbatch": 4} | layout)
        self.run = with_kept(resolve(replace(config, state=StateConfig(dir=str(folder)))), Device("cpu"))
        self.mesh = build_mesh(self.run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
        self.engine = Engine(self.run, units(self.run.shape), self.mesh)
        self.batches = list(small.batches(steps=2))

    def train(self, number, **more):
        batch = self.batches[number]
        mine = microbatches_of(batch.rows(rows(self.run.plan, self.mesh)), self.run.plan, self.mesh)
        result = self.engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3, **more)
        return result.loss, result.grad_norm

    def train_both(self):
        results = [self.train(0), self.train(1)]
        return results, [state.clone() for _, b in self.engine.each_buffer() for state in b.state]

    def watch(self):
        """Bytes that are alive after each instruction."""
        batch = self.batches[0]
        mine = microbatches_of(batch.rows(rows(self.run.plan, self.mesh)), self.run.plan, self.mesh)
        with Born() as born:
            watch = Watch(born.noted, self.engine, mine)
            self.engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3, record=watch)
        return watch.alive


LAYOUTS = [
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"schedule": "gpipe", "microbatch": 2},
    {"schedule": "zb-h1"},
    {"exact": True},
    {"exact": True, "recompute": "selective"},
    {"compute": "bf16"},
    {"dropout": 0.2},
    {"kernels": "torch"},
    {"reload_ahead": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_bits_as_in_memory(folder, layout):
    plain, moved = Rank(folder, **layout), Rank(folder, **{**layout, **DISK})
    (first, state), (second, other) = plain.train_both(), moved.train_both()
    assert second == first
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS[:6], ids=str)
def test_the_memory_that_is_predicted(folder, layout):
    rank = Rank(folder, **layout, **DISK)
    rank.train(0)
    program = rank.engine.step_program
    predicted = [held["kept"] + held["boundary"] for held in list_held_bytes(program, 0, unit_bytes(rank.run))]
    alive = [sum(sizes.values()) if isinstance(sizes, dict) else sizes for sizes in rank.watch()]
    assert max(alive) == pytest.approx(max(predicted), rel=0.02)
    if "zb" not in layout.get("schedule", ""):
        one = unit_bytes(rank.run)[1]
        kept = one.count_kept("all") if layout.get("recompute") == "full" else 0
        assert max(alive) <= 3 * one.count_kept("all") + 2 * one.boundary + kept


def test_a_recorded_step_keeps_the_rules_of_copies(folder):
    rank = Rank(folder, **DISK)
    rank.train(0)
    record = HostRecorder()
    rank.train(1, record=record)
    program = rank.engine.step_program
    events = [TimelineEvent(0, t.index, program.ranks[0][t.index], t.start_s, t.end_s) for t in record.ran()]
    assert any(isinstance(e.instruction, Offload) and e.end_s > e.start_s for e in events)
    check_copies(Timeline(program, tuple(events)))


def test_evaluation_moves_nothing(folder, monkeypatch):
    rank = Rank(folder, **DISK)
    monkeypatch.setattr(DirectFile, "write", lambda *_: pytest.fail("an evaluation keeps nothing"))
    batch = rank.batches[0]
    mine = microbatches_of(batch.rows(rows(rank.run.plan, rank.mesh)), rank.run.plan, rank.mesh)
    rank.engine.evaluate(mine)


def test_every_storage_moves_once_and_no_parameter(folder, monkeypatch):
    rank = Rank(folder, **DISK, microbatch=8)
    fixed = {t.untyped_storage().data_ptr() for _, b in rank.engine.each_buffer() for t in (b.full, b.gradient)}
    written, write = [], DirectFile.write

    def note(self, part, content):
        written.append(content.data_ptr())
        write(self, part, content)

    monkeypatch.setattr(DirectFile, "write", note)
    # Nothing is freed before its backward pass, so no address comes twice.
    monkeypatch.setattr(Offloader, "release", lambda self, place: None)
    monkeypatch.setattr(Offloader, "reload", lambda self, unit, m: self._units[unit, m].leaving)
    rank.train(0)
    assert written
    assert len(written) == len(set(written))
    assert not fixed & set(written)


def _offloads(monkeypatch, change):
    """Plant a change in every offload."""
    offload = Offloader.offload
    monkeypatch.setattr(Offloader, "offload", lambda self, unit, m: change(self, offload(self, unit, m), unit, m))


def test_a_flipped_byte_in_the_file_is_found(folder, monkeypatch):
    rank = Rank(folder, **DISK)

    def flip(offloader, pending, unit, m):
        pending.wait()
        (moved, _), *_ = offloader._units[unit, m].groups or [(None, None)]
        if moved is not None:
            fd = os.open(f"/proc/self/fd/{moved.copier._file.fd}", os.O_RDWR)
            byte = os.pread(fd, 1, moved.part.at)
            os.pwrite(fd, bytes([byte[0] ^ 4]), moved.part.at)
            os.fsync(fd)
            os.close(fd)
        return pending

    _offloads(monkeypatch, flip)
    with pytest.raises(DiskFault, match="are not what was written"):
        rank.train(0)


def test_a_reload_before_the_end_of_its_offload_is_found(folder, monkeypatch):
    rank = Rank(folder, **DISK)
    monkeypatch.setattr(Offloader, "release", _release_at_once)
    monkeypatch.setattr(DiskCopier, "store", lambda self, parts: self._start(self._out, lambda *_: None, parts))
    with pytest.raises(AssertionError, match="read before they are written"):
        rank.train(0)


def _release_at_once(offloader, place):
    """Free what is still being written."""
    for key in offloader._ended.get(place, ()):
        for _, tensors in offloader._units[key].groups:
            for tensor in tensors:
                tensor.release()


def test_a_part_that_is_reused_early_is_found(folder, monkeypatch):
    rank = Rank(folder, **DISK)

    def free(offloader, pending, unit, m):
        pending.wait()
        for moved, _ in offloader._units[unit, m].groups:
            moved.copier.free(moved.part)
        return pending

    _offloads(monkeypatch, free)
    with pytest.raises(DiskFault, match="are not what was written"):
        rank.train(0)


def test_a_graph_that_is_read_without_its_reload_is_found(folder, monkeypatch):
    rank = Rank(folder, **DISK)
    monkeypatch.setattr(Offloader, "ready", lambda self, unit, m: None)
    with pytest.raises(AssertionError, match="read while it is elsewhere"):
        rank.train(0)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_one_line(folder, monkeypatch, call):
    rank = Rank(folder, **DISK)

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct_file.os, call, fails)
    with pytest.raises(DiskFault, match=r"the file of activations in '.*' cannot .*: No space left on device"):
        rank.train(0)


def test_a_folder_without_direct_files_is_refused(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(direct_file.os, "open", fails)
    with pytest.raises(
        ConfigError, match=r"plan.activations = 'disk' needs files .* set state.dir to a folder on a disk"
    ):
        Rank(folder, **DISK)


def test_the_host_of_cpu_ranks_is_refused(folder):
    with pytest.raises(ConfigError, match=r"'host' on CPU ranks: .* 'disk'"):
        Rank(folder, activations=("host",))


def test_parts_of_a_file_come_back_whatever_their_size(folder):
    file = DirectFile(folder)
    sizes = [1, 3, 4, BLOCK - 1, BLOCK, BLOCK + 5, BUFFER, BUFFER + 7, 3 * BUFFER - 2]
    contents = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    parts = [file.allocate(size) for size in sizes]
    for part, content in zip(parts, contents, strict=True):
        file.write(part, content)
    for part, content in zip(parts, contents, strict=True):
        into = torch.zeros_like(content)
        file.read(part, into)
        assert torch.equal(into, content)
    ranges = sorted((part.at, part.at + part.room) for part in parts)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for part in parts[::2] + parts[1::2]:
        file.free(part)
    assert file.allocate(sum(part.room for part in parts)).at == 0
