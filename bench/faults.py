"""What faults leave on disk: processes killed at random instants of a save, and single bits flipped.

    python -m bench.faults                      200 kills of each kind, 600 flips, 10 rounds of lost ranks
    python -m bench.faults --kills 20 --rounds 2

Each round of kills begins with a checkpoint of step 1. Ranks, which are processes, save step 2 and drop step 1; one of
them, or the process between them that stands for the launcher, is killed by SIGKILL at a random instant. Every
checkpoint that can be seen afterwards must be wholly of one step; then a fresh save must leave no litter. Copies of the
state to memory are cut off in the same way, and at each of their points in turn (``faults_copied``). A flip is of one
random bit of a random file, the manifest included; ``verify`` must see it. In a round of lost ranks one of the demo's
is killed, stopped, or made to hang in C with the GIL: after how long it was named, and trained again.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from bench.fault_ranks import RANKS, Linked, between, forked, what_is, write
from bench.faults_copied import snapshot_kills, snapshot_points
from bench.machine import write_result
from bench.soak import recoveries, tokens
from superstep.cli.flags.options import DEMO
from superstep.cli.prove.fault_injection import SIGNALS
from superstep.errors import DamagedCheckpoint, StateError
from superstep.state.checkpoint_dirs import checkpoint_at, checkpoints
from superstep.state.verify import SingleProcess, verify

ROOT = Path(__file__).parents[1]


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
        between([theirs for theirs, _ in ends])

    began_s = time.perf_counter()
    processes += [forked(lambda number=number: rank(number)) for number in range(RANKS)]  # type: ignore[misc]
    processes.append(forked(launcher))
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
    write(root, 1, SingleProcess())
    typical_s = save_and_kill(root, None, 0.0)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(rounds):
        shutil.rmtree(root)
        write(root, 1, SingleProcess())
        victim, after_s = draw.randrange(RANKS + 1), draw.uniform(0.0, typical_s)
        save_and_kill(root, victim, after_s)
        seen = [what_is(place) for place in checkpoints(root)]
        found[" and ".join(seen)] += 1
        if not seen or not set(seen) <= {"step 1", "step 2"}:
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: {seen}")
        write(root, 3, SingleProcess())
        left = sorted(path.name for path in root.iterdir())
        if left != [checkpoint_at(root, 3).name]:
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: then {left}")
    return {"rounds": rounds, "left": dict(found), "wrong": wrong, "save_s": typical_s}


def flips(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """How many of so many single-bit flips were seen; ``unseen`` names the others."""
    draw = random.Random(seed)
    root = folder / "flipped"
    write(root, 1, SingleProcess())
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
        except DamagedCheckpoint:
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_points(options.kills, options.seed, Path(folder))
        copied = snapshot_kills(options.kills, options.seed, Path(folder))
        points = snapshot_points(Path(folder))
        flipped = flips(options.flips, options.seed, Path(folder))
    with tempfile.TemporaryDirectory(prefix="lost-") as folder:
        demo, corpus = tokens(DEMO, Path(folder))
        lost = recoveries(demo, corpus, Path(folder), rounds=options.rounds, seed=options.seed)
    result = ROOT / "bench" / "results" / "faults.json"
    write_result(result, kill_points=killed, snapshots=copied, snapshot_points=points, flips=flipped, lost=lost)
    print(f"{killed['rounds']} kills left {killed['left']}, wrong: {killed['wrong'] or 'none'}")
    print(f"{copied['rounds']} kills beside snapshots: {copied['of']}, wrong: {copied['wrong'] or 'none'}")
    print(f"killed at each of {points['points']} points of a copy, wrong: {points['wrong'] or 'none'}")
    for kind in SIGNALS:
        told = lost[kind]
        print(f"{kind}: seen within {told['seen_s']['max']:.2f} s, trains within {told['trains_again_s']['max']:.2f} s")
    print(f"{flipped['flips']} flips, unseen: {flipped['unseen'] or 'none'}")


if __name__ == "__main__":
    main()
