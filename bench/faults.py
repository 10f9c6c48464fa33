"""What faults leave on disk: processes killed at random instants of a save, and single bits flipped.

    python -m bench.faults                      200 kills of each kind, 600 flips
    python -m bench.faults --kills 20

Each round of kills begins with a checkpoint of step 1. Ranks, which are processes, save step 2 and drop step 1; one of
them, or the process between them that stands for the launcher, is killed by SIGKILL at a random instant. Every
checkpoint that can be seen afterwards must be wholly of one step; then a fresh save must leave no litter. A flip is of
one random bit of a random file, the manifest included; ``verify`` must see it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.machine import write_result
from superstep.errors import Damaged, StateError
from superstep.state.checkpoint import load, save
from superstep.state.flush import Flusher
from superstep.state.folders import checkpoint_at, checkpoints, prune
from superstep.state.manifest import Position
from superstep.state.piece import STATE, Kind, Piece
from superstep.state.snapshot import KEPT, WANTED, WHOLE, WRITING, Memory, common, described, made, pieces_of
from superstep.state.together import Peers
from superstep.state.verify import Alone, require_newest, verify

ROOT = Path(__file__).parents[1]
SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (96, 128), "b.weight": (64, 64), "c.bias": (128,)}
RANKS = 3


@dataclass(frozen=True)
class Linked:
    """A rank among processes, each with a pipe to the one between them."""

    rank: int
    size: int
    pipe: Connection

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        self.pipe.send(value)
        found: list[Any] = self.pipe.recv()
        return found


def pieces(step: int, rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """A rank's part of a state in which every value says its step."""
    for number, kind in enumerate(STATE):
        for name, shape in SHAPES.items():
            numel = int(torch.tensor(shape).prod())
            low, high = numel * rank // size, numel * (rank + 1) // size
            values = torch.full((high - low,), 1000.0 * step + number)
            index = tuple(slice(0, n) for n in shape)
            yield Piece(kind=kind, name=name, shape=shape, index=index, low=low, values=values, is_owner=True)


def write(root: Path, step: int, peers: Peers, keep: int = 1) -> None:
    """Save a step and drop those before, as a session does."""
    place, tensors = checkpoint_at(root, step), _tensors()
    mine = pieces(step, peers.rank, peers.size)
    save(place, mine, Position(step=step), peers, tensors=tensors, beside={"config.json": "{}"})
    require_newest(place, keep, peers)
    if peers.rank == 0:
        prune(root, keep)


def _tensors() -> dict[Kind, dict[str, tuple[int, ...]]]:
    return dict.fromkeys(STATE, SHAPES)


def what_is(folder: Path) -> str:
    """``step K`` where every value of a checkpoint is of step K; else ``mixed``, or ``unloadable``."""
    target = list(pieces(0))
    try:
        step = load(folder, target, Alone()).step
    except StateError:
        return "unloadable"
    right = all(torch.equal(a.values, b.values) for a, b in zip(target, pieces(step), strict=True))
    return f"step {step}" if right else "mixed"


def _forked(work: Callable[[], None]) -> int:
    """The number of a process that does the work and ends."""
    process = os.fork()
    if process:
        return process
    status = 1
    with contextlib.suppress(BaseException):
        work()
        status = 0
    os._exit(status)


def _between(pipes: Sequence[Connection]) -> None:
    """What stands for the launcher: hands values on until a rank has gone."""
    while True:
        values = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(values)


def save_and_kill(root: Path, victim: int | None, after_s: float) -> float:
    """Save step 2 on processes; kill number ``victim`` of them, of which the last stands for the launcher. The seconds
    until the last one had ended.
    """
    ends = [Pipe() for _ in range(RANKS)]
    processes: list[int] = []

    def rank(number: int) -> None:
        for other, (theirs, ours) in enumerate(ends):
            theirs.close()
            if other != number:
                ours.close()
        write(root, 2, Linked(number, RANKS, ends[number][1]))

    def launcher() -> None:
        for _, ours in ends:
            ours.close()
        _between([theirs for theirs, _ in ends])

    began_s = time.perf_counter()
    processes += [_forked(lambda number=number: rank(number)) for number in range(RANKS)]  # type: ignore[misc]
    processes.append(_forked(launcher))
    for pair in ends:
        for end in pair:
            end.close()
    if victim is not None:
        time.sleep(after_s)
        os.kill(processes[victim], signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)
    return time.perf_counter() - began_s


def kill_points(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """What so many kills left; ``wrong`` says of each round that left anything but whole checkpoints."""
    draw = random.Random(seed)
    torch.set_num_threads(1)
    root = folder / "checkpoints"
    write(root, 1, Alone())
    typical_s = save_and_kill(root, None, 0.0)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(rounds):
        shutil.rmtree(root)
        write(root, 1, Alone())
        victim, after_s = draw.randrange(RANKS + 1), draw.uniform(0.0, typical_s)
        save_and_kill(root, victim, after_s)
        seen = [what_is(place) for place in checkpoints(root)]
        found[" and ".join(seen)] += 1
        if not seen or not set(seen) <= {"step 1", "step 2"}:
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: {seen}")
        write(root, 3, Alone())
        left = sorted(path.name for path in root.iterdir())
        if left != [checkpoint_at(root, 3).name]:
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: then {left}")
    return {"rounds": rounds, "left": dict(found), "wrong": wrong, "save_s": typical_s}


def snapshot_kills(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """What is left where ranks copy step after step into memory, every third for the disk, and one of them is killed or
    the process that writes to the disk: the newest common step in memory, and each checkpoint, are wholly of one step.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)
    wrong: list[str] = []
    found: Counter[str] = Counter()
    for number in range(rounds):
        root = folder / f"snapshots-{number}"
        victim, after_s = draw.randrange(RANKS + 1), draw.uniform(0.02, 0.4)
        _, memories = made(RANKS)
        _copy_and_kill(memories, root, victim, after_s)
        step = common(memories)
        seen = [what_is(place) for place in checkpoints(root)]
        found["rank" if victim < RANKS else "flusher"] += 1
        found["checkpoints"] += len(seen)
        finished = max(max(memory.whole(), default=0) for memory in memories)
        if step is not None and step < finished - 1:
            wrong.append(f"round {number}: {finished - step} steps lost")
        if step is not None and not _is_of_one_step(memories, step):
            wrong.append(f"round {number}: memory of step {step} is mixed")
        if not all(each.startswith("step ") for each in seen):
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: {seen}")
        for memory in memories:
            memory.close()
        shutil.rmtree(root, ignore_errors=True)
    return {"rounds": rounds, "of": dict(found), "wrong": wrong}


def _copy_and_kill(memories: Sequence[Memory], root: Path, victim: int, after_s: float) -> None:
    for rank, memory in enumerate(memories):
        placed, at = [], 0
        for piece in pieces(0, rank, RANKS):
            placed.append((piece, at))
            at += 4 * piece.values.numel()
        shapes = {name: list(shape) for name, shape in SHAPES.items()}
        table = {"pieces": described(placed), "shapes": shapes, "beside": {}, "folder": str(root)}
        memory.lay_out(table, at)
    ends = [Pipe() for _ in range(RANKS)]

    def flusher() -> None:
        with Flusher(memories, keep=2):
            time.sleep(60)

    processes = [_forked(lambda number=number: _copy(memories[number], ends[number][1])) for number in range(RANKS)]  # type: ignore[misc]
    processes.append(_forked(flusher))
    processes.append(_forked(lambda: _between([theirs for theirs, _ in ends])))
    time.sleep(after_s)
    os.kill(processes[victim], signal.SIGKILL)
    time.sleep(0.01)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    for pair in ends:
        for end in pair:
            end.close()


def _copy(memory: Memory, pipe: Connection) -> None:
    """A rank that does nothing but copy: the state of each step, in step with the others."""
    table = memory.table()["pieces"]
    for step in itertools.count(1):
        pipe.send(step)
        pipe.recv()
        while (slot := memory.free_slot()) is None:
            time.sleep(0.001)
        memory.put(slot, "state", WRITING)
        memory.put(slot, "step", step)
        memory.put(slot, "disk", WANTED if step % 3 == 0 else KEPT)
        for number, told in enumerate(table):
            kind = number // len(SHAPES)
            memory.values(slot, told["offset"], told["count"]).fill_(1000.0 * step + kind)
        memory.put(slot, "state", WHOLE)


def _is_of_one_step(memories: Sequence[Memory], step: int) -> bool:
    return all(
        bool((piece.values == 1000.0 * step + STATE.index(piece.kind)).all())
        for memory in memories
        for piece in pieces_of(memory, memory.whole()[step])
    )


def flips(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """How many of so many single-bit flips were seen; ``unseen`` names the others."""
    draw = random.Random(seed)
    root = folder / "flipped"
    write(root, 1, Alone())
    place = checkpoint_at(root, 1)
    files = sorted(path for path in place.iterdir() if path.stat().st_size)
    of_file: Counter[str] = Counter()
    unseen: list[str] = []
    for number in range(count):
        path = files[number % len(files)]  # small files as often as large ones
        data = path.read_bytes()
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            verify(place)
        except Damaged:
            pass
        except StateError as error:  # a format that is not ours any more is refused, too
            assert "format" in str(error), error  # noqa: PT017
        else:
            unseen.append(f"{path.name}, byte {at}, bit {bit}")
        path.write_bytes(data)
        of_file[path.name] += 1
    verify(place)
    return {"flips": count, "of": dict(of_file), "unseen": unseen}


def main() -> None:
    """Run both and write what was found."""
    parser = argparse.ArgumentParser(description="Kill points and flipped bits of checkpoints.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_points(options.kills, options.seed, Path(folder))
        copied = snapshot_kills(options.kills, options.seed, Path(folder))
        flipped = flips(options.flips, options.seed, Path(folder))
    write_result(ROOT / "bench" / "results" / "faults.json", kill_points=killed, snapshots=copied, flips=flipped)
    print(f"{killed['rounds']} kills left {killed['left']}, wrong: {killed['wrong'] or 'none'}")
    print(f"{copied['rounds']} kills beside snapshots: {copied['of']}, wrong: {copied['wrong'] or 'none'}")
    print(f"{flipped['flips']} flips, unseen: {flipped['unseen'] or 'none'}")


if __name__ == "__main__":
    main()
