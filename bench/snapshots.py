"""What a copy of the state costs training: in memory, against a plain memcpy and against PyTorch's ways to disk; and
what reading it back takes.

    python -m bench.snapshots                       two ranks, 12 layers of width 512
    python -m bench.snapshots --layers 2 --width 128 --repeats 3

All in one sitting, by the same ranks, of the same bytes (weights and moments, ZeRO 1), taking turns:

    memcpy          the state into memory that is there already
    snapshot        the copy of ``state.snapshot_every``, beside a step; its stall is what such a step takes longer than
                    the one before it, and what it does not take longer is hidden
    snapshot, bare  the same copy with nothing beside it
    torch.save, torch.distributed.checkpoint save and async_save, and ours: until training may go on, and until it is
                    on disk

Save and load are held against the disk's own rate, and the memory that a load takes at its peak, beside what it fills,
against the largest tensor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers, barrier, gather
from superstep.engine.engine import Engine
from superstep.engine.flat.snapshots import FlushResult
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.measure.disk import disk_rates
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.ranks import World, launch_apart
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.instructions import Snapshot
from superstep.state.checkpoint import load, save
from superstep.state.manifest import Position
from superstep.state.snapshots.background_checkpoint import Flusher
from superstep.state.snapshots.memory_snapshot import Handles, make_memories
from superstep.train.weights.model import tensor_shapes

CPU = Device("cpu")

RESULT = Path(__file__).parent / "results" / "snapshots.json"
RANKS = 2
WARM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure."""

    layers: int
    width: int
    sequence: int
    repeats: int


def run_of(asked: Asked) -> Resolved:
    """The run whose state is copied."""
    heads = max(1, asked.width // 64)
    model = ModelConfig(name="demo", layers=asked.layers, width=asked.width, heads=heads, kv_heads=heads,
                        head_dim=asked.width // heads, ffn=4 * asked.width, vocab=4096)  # fmt: skip
    return resolve(
        RunConfig(
            model=model,
            data=DataConfig(sequence_tokens=asked.sequence),
            train=TrainConfig(batch_sequences=2 * RANKS),
            plan=PlanConfig(dp=RANKS, zero=1),
            state=StateConfig(snapshot_every=1),
        ),
        RANKS,
    )


class Sitting:
    """One rank's part of it."""

    def __init__(self, world: World, run: Resolved, handles: Handles, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
        self._engine = Engine(run, units(run.shape), self._mesh)
        self._peers = RankPeers(world.rank, world.size)
        self._tensors = dict.fromkeys(self._engine.state_kinds, tensor_shapes(self._engine))
        self._snapshots = self._engine.keep_snapshots(handles.of(world.rank))
        self._written: list[FlushResult] = []
        self._snapshots.lay_out(self._engine.pieces(), self._tensors, {}, folder / "flushed")
        self._apart = dist.new_group(backend="gloo")  # what is saved behind training talks there
        self._step = 0
        self.bytes = self._snapshots.bytes
        self._kept: list[tuple[Tensor, Tensor]] = []
        for piece in self._engine.pieces():
            self._kept.append((piece.values, torch.empty_like(piece.values)))

    def train(self, *, is_copied: bool, is_for_disk: bool = False) -> tuple[float, float]:
        """Seconds of a step, and of the copies in it."""
        generator = torch.Generator().manual_seed(self._step)
        shape = (self._run.config.train.batch_sequences, self._run.config.data.sequence_tokens)
        tokens = torch.randint(0, 4096, shape, generator=generator)
        mine = rows(self._run.plan, self._mesh)
        parts = microbatches(tokens[mine], tokens[mine], self._run.plan, self._mesh)
        record = HostRecorder()
        barrier(CPU)
        begin_s = time.perf_counter()
        if is_copied:
            self._snapshots.begin(Position(step=self._step), self._written.append, is_for_disk=is_for_disk)
        self._engine.train_step(parts, valid_tokens=tokens.numel(), lr=1e-4, record=record)
        seconds = time.perf_counter() - begin_s
        self._step += 1
        ran = zip(self._engine.step_program.ranks[0], record.ran(), strict=True)
        return seconds, sum(r.end_s - r.start_s for i, r in ran if isinstance(i, Snapshot)) if is_copied else 0.0

    def bare(self) -> None:
        """A snapshot with nothing beside it."""
        self._snapshots.begin(Position(step=self._step), self._written.append, is_for_disk=False)
        for pending in [self._snapshots.copy(unit) for unit in self._engine.buffers]:
            pending.wait()
        self._step += 1  # no two copies are of one step

    def memcpy(self) -> None:
        """The same bytes into memory that is there."""
        for values, held in self._kept:
            held.copy_(values)

    def state(self) -> dict[str, Tensor]:
        """The same bytes under names of this rank alone."""
        return {f"{self._peers.rank}.{p.kind}.{p.name}.{p.low}": p.values for p in self._engine.pieces()}

    def torch_save(self, place: Path) -> None:
        """Each rank a file, synced as ours is."""
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"{self._peers.rank}.pt").open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(self, place: Path) -> None:
        """PyTorch's distributed checkpoint."""
        dcp.save(self.state(), checkpoint_id=place)

    def dcp_async(self, place: Path) -> Callable[[], object]:
        """The same behind training; what waits for it."""
        found: Any = dcp.async_save(self.state(), checkpoint_id=place, process_group=self._apart)
        return lambda: getattr(found, "upload_completion", found).result()

    def save(self, place: Path) -> None:
        """Ours, by the ranks."""
        save(place, self._engine.pieces(), Position(step=self._step), self._peers, tensors=self._tensors, beside={})

    def flush(self) -> tuple[float, float]:
        """Ours, by the launcher: the seconds of the step that copies, and until the disk has it."""
        begin_s = time.perf_counter()
        self._written.clear()
        seconds, _ = self.train(is_copied=True, is_for_disk=True)
        while not self._written:
            self._snapshots.report_written(self._written.append)
            time.sleep(0.002)
        return seconds, time.perf_counter() - begin_s

    def load(self, place: Path) -> int:
        """Read it back; the bytes that this took at its peak, beside what it fills."""
        before = _peak_from_here()
        load(place, self._engine.pieces(), self._peers)
        return _status("VmHWM") - before

    def largest_bytes(self) -> int:
        """Of a tensor."""
        return 4 * max(int(torch.tensor(shape).prod()) for shape in self._tensors["weight"].values())

    def close(self) -> None:
        """Give everything back."""
        self._snapshots.close()
        self._mesh.destroy()


def _peak_from_here() -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    barrier(CPU)
    begin_s = time.perf_counter()
    work()
    return max(gather(time.perf_counter() - begin_s, float))


def _forget(place: Path) -> None:
    """Ask the system to drop what it has cached of the files."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rank(world: World, run: Resolved, handles: Handles, folder: Path, repeats: int) -> dict[str, Any]:
    sitting = Sitting(world, run, handles, folder)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(max(gather(value, float)))

    peaks: list[int] = []
    for number in range(WARM + repeats):
        if number == WARM:
            seconds.clear()
        note("step", sitting.train(is_copied=False)[0])
        with_copy_s, copy_s = sitting.train(is_copied=True)
        note("step with a snapshot", with_copy_s)
        note("copy within the step", copy_s)
        note("memcpy", _timed(sitting.memcpy))
        note("snapshot, bare", _timed(sitting.bare))
        for name, way in (("torch.save", sitting.torch_save), ("dcp.save", sitting.dcp_save), ("save", sitting.save)):
            place = folder / f"{name}-{number}"
            note(name, _timed(lambda way=way, place=place: way(place)))  # type: ignore[misc]
        _forget(folder / f"save-{number}")
        note("load", _timed(lambda number=number: peaks.append(sitting.load(folder / f"save-{number}"))))  # type: ignore[misc]
        barrier(CPU)
        begin_s = time.perf_counter()
        wait = sitting.dcp_async(folder / f"async-{number}")
        note("dcp.async_save returns", time.perf_counter() - begin_s)
        wait()
        note("dcp.async_save is done", time.perf_counter() - begin_s)
        step_s, done_s = sitting.flush()
        note("step with a snapshot for the disk", step_s)
        note("snapshot is on disk", done_s)
        barrier(CPU)
        if world.rank == 0:
            for place in folder.iterdir():
                shutil.rmtree(place)
        barrier(CPU)
    found = {
        "bytes": sum(gather(sitting.bytes, int)),
        "seconds": {name: {"median": median(each), "all": each} for name, each in seconds.items()},
        "load_peak_bytes": max(gather(max(peaks[WARM:]), int)),
        "largest_tensor_bytes": sitting.largest_bytes(),
    }
    sitting.close()
    return found


def ratios(found: dict[str, Any], disk: tuple[float, float]) -> dict[str, float]:
    """What is to be told."""
    each = {name: told["median"] for name, told in found["seconds"].items()}
    pairs = (found["seconds"][name]["all"] for name in ("step with a snapshot", "step"))
    stall_s = median(later - earlier for later, earlier in zip(*pairs, strict=True))
    read, write = disk
    return {
        "stall_over_memcpy": stall_s / each["memcpy"],
        "bare_over_memcpy": each["snapshot, bare"] / each["memcpy"],
        "hidden": 1 - stall_s / each["snapshot, bare"],
        "torch_save_over_stall": each["torch.save"] / max(stall_s, 1e-9),
        "dcp_save_over_stall": each["dcp.save"] / max(stall_s, 1e-9),
        "dcp_async_over_stall": each["dcp.async_save returns"] / max(stall_s, 1e-9),
        "save_over_torch_save": each["save"] / each["torch.save"],
        "save_over_dcp": each["save"] / each["dcp.save"],
        "save_of_disk_rate": found["bytes"] / each["save"] / write,
        "load_of_disk_rate": found["bytes"] / each["load"] / read,
        "load_peak_over_largest_tensor": found["load_peak_bytes"] / found["largest_tensor_bytes"],
    }


def measured(asked: Asked, folder: Path) -> dict[str, Any]:
    """All of it."""
    run = run_of(asked)
    handles, memories = make_memories(RANKS)
    work = folder / "work"
    work.mkdir()
    with Flusher(memories, work, keep=1):
        found: dict[str, Any] = launch_apart("cpu", RANKS, _rank, run, handles, work, asked.repeats)
    for memory in memories:
        memory.close()
    disk = disk_rates(folder)
    return {**found, "disk": {"read": disk[0], "write": disk[1]}, "ratios": ratios(found, disk)}


def main() -> None:
    """Measure, write, and say it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="on the disk that is meant")
    options = parser.parse_args()
    asked = Asked(layers=options.layers, width=options.width, sequence=options.sequence, repeats=options.repeats)
    with tempfile.TemporaryDirectory(prefix="snapshots-", dir=options.folder) as name:
        found = measured(asked, Path(name))
    write_result(RESULT, ranks=RANKS, layers=asked.layers, width=asked.width, repeats=asked.repeats, **found)
    for name, value in found["ratios"].items():
        print(f"{name:32}{value:10.3g}")


if __name__ == "__main__":
    main()
