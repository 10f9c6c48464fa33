"""The memory of snapshots: what is not whole is never taken for it, and what the disk shall have stays until it has."""

import errno
import os
import threading
from unittest import mock

import pytest
import torch

import saved
from failing_disk import FailingDisk
from superstep.comm.device import Device
from superstep.errors import DiskFault, Fault
from superstep.kernels.checksum import checksum
from superstep.launch.ranks import World
from superstep.run.hosts import elastic
from superstep.state.checkpoint import load
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.snapshots import background_checkpoint
from superstep.state.snapshots.background_checkpoint import Flusher
from superstep.state.snapshots.damage import newest_undamaged
from superstep.state.snapshots.memory_snapshot import (
    FAILED,
    HOSTS_SLOTS,
    KEPT,
    ON_DISK,
    PAGE,
    SLOTS,
    WANTED,
    WHOLE,
    WRITING,
    DamagedSnapshot,
    Handles,
    common,
    describe_pieces,
    make_memories,
    oldest_wanted,
    pieces_of,
)
from superstep.state.verify import SingleProcess
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder

SHAPES = saved.SHAPES


def _cut(fill):
    """The state in pieces, none of them empty."""
    return [piece for piece in saved.pieces(fill, cuts=2) if piece.values.numel()]


@pytest.fixture
def memories(tmp_path):
    """Those of two ranks, each with every other piece of the state."""
    handles, found = make_memories(2)
    assert handles.owner == os.getpid()
    for rank, memory in enumerate(found):
        placed, at = [], 0
        for piece in _cut(saved.zeros)[rank::2]:
            placed.append((piece, at))
            at += 4 * piece.values.numel()
        shapes = {name: list(shape) for name, shape in SHAPES.items()}
        table = {
            "pieces": describe_pieces(placed),
            "kinds": saved.STATE,
            "shapes": shapes,
            "beside": {},
            "folder": str(tmp_path / "checkpoints"),
        }
        assert not memory.is_laid_out
        memory.lay_out(table, at)
    yield found
    for memory in found:
        memory.close()


def _begin(memory, step, *, disk=0):
    slot = memory.free_slot()
    memory.put(slot, "state", WRITING)
    memory.put(slot, "step", step)
    memory.put(slot, "disk", disk)
    return slot


def _copied(memories, step, *, disk=0, fill=saved.truth):
    """Every rank's state after a step, whole."""
    every = _cut(fill)
    for rank, memory in enumerate(memories):
        slot = _begin(memory, step, disk=disk)
        for told, piece in zip(memory.table()["pieces"], every[rank::2], strict=True):
            memory.values(slot, told["offset"], told["count"]).copy_(piece.values)
        memory.seal(slot, int(checksum(memory.words(slot))))
        memory.put(slot, "state", WHOLE)


def test_a_copy_that_was_cut_off_is_not_gone_on_from(memories):
    assert common(memories) is None
    _copied(memories, 1)
    assert common(memories) == 1
    _begin(memories[0], 2)  # killed in the middle of the copy
    assert common(memories) == 1
    memories[1].put(_begin(memories[1], 2), "state", WHOLE)
    assert common(memories) == 1, "one rank alone is not enough"
    assert os.path.exists(f"/proc/self/fd/{memories[0].handle}")


def test_two_slots_take_turns_and_a_third_waits_for_the_disk(memories):
    seen = []
    for step in range(1, 5):
        _copied(memories, step)
        seen.append(memories[0].whole()[step])
    assert len(set(seen)) == 2, "memory of the third is not touched"
    _copied(memories, 5, disk=WANTED)
    held = memories[0].whole()[5]
    for step in range(6, 12):
        _copied(memories, step)
        assert memories[0].whole()[5] == held, "until the disk has it"
        assert common(memories) == step
    assert oldest_wanted(memories).position.step == 5
    assert len(memories[0].whole()) == SLOTS


def test_what_the_disk_could_not_have_is_not_copied_over_before_that_was_seen(memories):
    """Else nobody ever hears of it, and training waits for a disk that nothing is written to any more."""
    _copied(memories, 3, disk=WANTED)
    held = memories[0].whole()[3]
    memories[0].put(held, "disk", FAILED)
    for step in range(4, 8):
        _copied(memories[:1], step)
        assert memories[0].get(held, "disk") == FAILED


def test_a_second_copy_of_a_step_does_not_hide_the_one_that_the_disk_shall_have(memories):
    """A run that goes on from step 3 copies it again, and the disk may not have had it by then."""
    _copied(memories, 3, disk=WANTED)
    held = [memory.whole()[3] for memory in memories]
    _copied(memories, 3)
    assert [memory.whole()[3] for memory in memories] != held
    assert oldest_wanted(memories).position.step == 3
    assert oldest_wanted(memories).slots == tuple(held)


def test_what_another_host_shall_have_stays_until_something_else_is_held(tmp_path):
    (memory,) = make_memories(1, 3)[1]
    memory.lay_out({"pieces": []}, 4096, HOSTS_SLOTS)
    for step in range(1, 4):
        slot = _begin(memory, step)
        memory.put(slot, "turn", 7)
        memory.put(slot, "is_held", int(step == 2))
        memory.put(slot, "state", WHOLE)
    held = memory.states(held=True)
    assert list(held) == [(2, 7)]
    for step in range(4, 9):
        slot = _begin(memory, step)
        assert slot != held[2, 7]
        memory.put(slot, "turn", 7)
        memory.put(slot, "state", WHOLE)
    memory.hold_only({2, 9})
    assert memory.states(held=True) == held
    memory.hold_only({9})
    assert memory.states(held=True) == {}
    memory.forget_after(7)
    assert max(memory.states()) == (7, 7)
    memory.forget_after(-1)
    assert memory.states() == {}
    memory.close()


def test_what_is_wanted_comes_to_the_disk_as_ranks_would_have_written_it(memories, tmp_path):
    with Flusher(memories, tmp_path, keep=1):
        _copied(memories, 3, fill=saved.zeros, disk=WANTED)
    with Flusher(memories, tmp_path, keep=1):
        _copied(memories, 4, disk=WANTED)
    (place,) = checkpoints(tmp_path / "checkpoints")
    target = saved.pieces(saved.zeros)
    assert load(place, target, SingleProcess()).step == 4
    right = saved.pieces(saved.truth)
    assert all(torch.equal(a.values, b.values) for a, b in zip(target, right, strict=True))
    theirs = saved.write(tmp_path / "theirs", 4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (place / name).read_bytes() == (theirs / name).read_bytes()
    slot = memories[1].whole()[4]
    assert memories[1].get(slot, "disk") == ON_DISK
    assert memories[1].get(slot, "written_bytes") > 0


def _flip(memory, slot, word=3, bit=5):
    memory.words(slot)[word] ^= 1 << bit


def test_a_flip_of_any_bit_of_a_slot_or_of_its_position_is_seen(memories):
    _copied(memories, 5)
    memory = memories[0]
    slot = memory.whole()[5]
    assert not memory.is_damaged(slot)
    for at in (0, 17, memory.slot_bytes // 4 - 1):
        for bit in range(31):
            _flip(memory, slot, at, bit)
            assert memory.is_damaged(slot)
            _flip(memory, slot, at, bit)
    for field in ("step", "samples", "tokens", "turn", "checksum"):
        for bit in range(64):
            before = memory.get(slot, field)
            memory.put(slot, field, before ^ 1 << bit)
            assert memory.is_damaged(slot), (field, bit)
            memory.put(slot, field, before)
    assert not memory.is_damaged(slot)
    memory.view[PAGE + 9] ^= 4
    assert memory.is_damaged(slot), "its table says where pieces lie"
    with pytest.raises(Fault, match="the table of a snapshot's memory has other bits"):
        memory.table()


def test_the_newest_state_without_damage_is_gone_on_from(memories):
    idle = threading.Lock()
    _copied(memories, 1)
    _copied(memories, 2)
    assert newest_undamaged(memories, idle) == (2, ())
    _flip(memories[1], memories[1].whole()[2])
    said = "rank 1: the copy of step {} in memory has other bits than were copied"
    assert newest_undamaged(memories, idle) == (1, (said.format(2),))
    assert 2 not in memories[1].whole()
    _flip(memories[1], memories[1].whole()[1])
    assert newest_undamaged(memories, idle) == (None, (said.format(1),))


@pytest.mark.parametrize("when", ["before it is written", "while it is written"])
def test_nothing_is_written_into_another_folder_of_the_name(memories, tmp_path, when):
    """The run directory was moved, and one of another run is in its place."""
    moved = tmp_path.with_name(f"{tmp_path.name} moved")

    def take_its_name():
        if not moved.exists():
            tmp_path.rename(moved)
            (tmp_path / "checkpoints").mkdir(parents=True)
            for step in (1, 2):
                saved.write(tmp_path / "checkpoints", step)

    def after_it_is_taken(memory, slot):
        take_its_name()
        yield from pieces_of(memory, slot)

    with mock.patch.object(background_checkpoint, "pieces_of", after_it_is_taken), Flusher(memories, tmp_path, keep=1):
        if when == "before it is written":
            take_its_name()
        _copied(memories, 3, disk=WANTED)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000001", "step-000002"]
    assert checkpoints(moved / "checkpoints") == []
    slot = memories[0].whole()[3]
    assert memories[0].get(slot, "disk") == FAILED
    assert "another folder" in memories[0].note(slot)


def test_a_damaged_slot_does_not_come_to_the_disk_and_training_goes_on(memories, tmp_path):
    _copied(memories, 3, disk=WANTED)
    held = [memory.whole()[3] for memory in memories]
    _flip(memories[1], held[1])
    with Flusher(memories, tmp_path, keep=2):
        pass
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == []
    assert memories[0].refused == DamagedSnapshot(3, 1)
    assert [memory.get(slot, "disk") for memory, slot in zip(memories, held, strict=True)] == [KEPT, KEPT]
    assert (3 in memories[0].whole(), 3 in memories[1].whole()) == (True, False)
    _copied(memories, 4, disk=WANTED)
    with Flusher(memories, tmp_path, keep=2):
        pass
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000004"]


def test_a_bit_that_flips_while_a_slot_is_written_is_seen_before_the_checkpoint_has_its_name(memories, tmp_path):
    _copied(memories, 3, disk=WANTED)
    slot, pieces = memories[1].whole()[3], background_checkpoint.pieces_of

    def flipping(memory, at):
        for piece in pieces(memory, at):
            if memory is memories[1] and not memories[1].is_damaged(slot):
                _flip(memories[1], slot)
            yield piece

    with mock.patch.object(background_checkpoint, "pieces_of", flipping), Flusher(memories, tmp_path, keep=2):
        pass
    assert checkpoints(tmp_path / "checkpoints") == []
    assert memories[0].refused == DamagedSnapshot(3, 1)


def test_a_disk_that_fails_once_is_tried_again(memories, tmp_path):
    with FailingDisk() as counted, Flusher(memories, tmp_path, keep=1):
        _copied(memories, 3, fill=saved.zeros, disk=WANTED)
    with FailingDisk(counted.calls // 2, errno.EIO) as disk, Flusher(memories, tmp_path, keep=1):
        _copied(memories, 4, disk=WANTED)
    assert disk.failed
    assert [place.name for place in checkpoints(tmp_path / "checkpoints")] == ["step-000004"]
    slot = memories[0].whole()[4]
    assert (memories[0].get(slot, "disk"), memories[0].note(slot)) == (ON_DISK, "")


def test_a_disk_that_fills_is_told_and_older_checkpoints_stay(memories, tmp_path):
    with Flusher(memories, tmp_path, keep=1):
        _copied(memories, 3, disk=WANTED)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full, Flusher(memories, tmp_path, keep=1):
        _copied(memories, 4, disk=WANTED)
    for memory in memories:
        slot = memory.whole()[4]
        assert memory.get(slot, "disk") == FAILED
        assert "step-000004.partial cannot be written: No space left on device; make room" in memory.note(slot)
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()} == before


def _write_parts(memories, root, monkeypatch, displaced=None):
    """As the launcher of the only host that is left has them written."""
    monkeypatch.setattr(elastic, "RankPeers", lambda rank, size: SingleProcess())
    handles = Handles(owner=os.getpid(), numbers=tuple(memory.handle for memory in memories))
    parts = elastic.StateParts(
        handles=(handles,), state=(4, 0), folder=RunFolder(root=root), keep=1, displaced=displaced
    )
    elastic.write_parts(World(0, 1, Device("cpu")), parts)


def test_what_a_host_has_is_written_where_the_run_directory_is_now(memories, tmp_path, monkeypatch):
    _copied(memories, 4)
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    with FolderWatch(RunFolder(root=run), {"run.toml": "seed = 1"}) as watch:
        assert watch.look() is None
        run.rename(moved)
        run.mkdir()  # somebody's
        with pytest.raises(Fault, match=r"was moved to .*/moved; the state is saved there") as fault:
            _write_parts(memories, run, monkeypatch, watch.look())
    assert fault.value.saved_in == str(moved)
    assert not any(run.iterdir())
    (place,) = checkpoints(moved / "checkpoints")
    assert load(place, saved.pieces(saved.zeros), SingleProcess()).step == 4


def test_a_folder_that_takes_the_name_while_a_host_writes_gets_nothing(memories, tmp_path, monkeypatch):
    _copied(memories, 4)
    run, inner = tmp_path / "run", background_checkpoint.pieces_of

    def after_another_has_its_name(memory, slot):
        if not (tmp_path / "moved").exists():
            run.rename(tmp_path / "moved")
            run.mkdir()
        return inner(memory, slot)

    run.mkdir()
    monkeypatch.setattr(background_checkpoint, "pieces_of", after_another_has_its_name)
    with pytest.raises(Fault, match="is another folder now, and nothing is written there"):
        _write_parts(memories, run, monkeypatch)
    assert checkpoints(run / "checkpoints") == []
    with pytest.raises(DiskFault, match="see that the folder is there"):
        _write_parts(memories, tmp_path / "nowhere", monkeypatch)
