"""Fault injection: a run in a process of its own, and each fault, until it trains again."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from superstep.errors import Fault, StateError
from superstep.observe.jsonl import read
from superstep.plan.config import RunConfig
from superstep.plan.config_io import write_config
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.verify import verify
from superstep.train.run_folder.run_paths import RunFolder

COMMAND = "superstep.cli.train.fault_in_run"
"""The module that trains with ranks for fault injection."""

HANG = signal.SIGUSR1
"""The signal that makes such a rank hang."""

Kind = Literal["killed", "stopped", "hung", "launcher", "damaged", "full disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SIGNALS: Mapping[Kind, int] = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hung": HANG}

FAULT_TEXTS: Mapping[Kind, str] = {"killed": "was killed by SIGKILL", "stopped": "was stopped", "hung": "hangs"}
"""Expected messages about a rank."""

POLL_S = 0.01
PATIENCE_S = 300.0
LEAVING_S = 15.0
FULL_BYTES = 4096


def ranks_of(folder: RunFolder) -> Path:
    """The folder in which each rank of a run writes its process id, beside the run's folder."""
    return folder.root.with_name(f"{folder.root.name}.ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """The outcome of one fault.

    Attributes:
        kind: of fault.
        what: the target, in words.
        step: finished steps at that time.
        noticed_s: until it was detected; None if nothing can detect it.
        again_s: until the first new step.
        redone: number of repeated steps.
        wrong: the deviation from the expected outcome; empty without one.
    """

    kind: Kind
    what: str
    step: int
    noticed_s: float | None
    again_s: float
    redone: int
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class _Before:
    """A run at the time of a fault: finished steps, the seconds of the host's clock, the file of its metrics."""

    step: int
    at_s: float
    file: int


def _before(run: FaultyRun) -> _Before:
    return _Before(run.step(), time.time(), run.file())


class FaultyRun:
    """A run and its launcher's process.

    Args:
        config: of the run, with prepared tokens and a folder of its own.
        place: a folder for the process's output and temporary files, with a short name.
    """

    def __init__(self, config: RunConfig, place: Path) -> None:
        self._config = config
        self._place = place
        self.folder = RunFolder(root=Path(config.state.dir))
        self._output = place / f"{self.folder.root.name}.said"
        self._temporary = place / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._all: dict[int, psutil.Process] = {}

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        assert self._process is not None
        return self._process

    def begin(self) -> None:
        """Start or resume it."""
        path = self._place / f"{self.folder.root.name}.toml"
        is_there = self.folder.config.is_file()
        config = replace(self._config, state=replace(self._config.state, existing="resume" if is_there else "refuse"))
        path.write_text(write_config(config), encoding="utf-8")
        command = [sys.executable, "-m", COMMAND, str(path)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(self._temporary)}
            )

    def steps(self) -> list[dict[str, Any]]:
        """Its metrics of steps and recoveries, in order."""
        try:
            return [line for line in read(self.folder.metrics) if line.get("event") in ("step", "resumed")]
        except FileNotFoundError:
            return []

    def step(self) -> int:
        """The last finished step in its metrics."""
        return next((int(line["step"]) for line in reversed(self.tail()) if line.get("event") == "step"), 0)

    def file(self) -> int:
        """The inode of its metrics."""
        try:
            return self.folder.metrics.stat().st_ino
        except OSError:
            return 0

    def tail(self) -> list[dict[str, Any]]:
        """The last few lines of its metrics."""
        try:
            with self.folder.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                lines = file.read().split(b"\n")
        except OSError:
            return []
        newest = []
        for line in lines:
            with suppress(ValueError):
                newest.append(json.loads(line))
        return newest

    def wait_for(self, is_there: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds.

        Raises:
            Fault: the run has ended before, or it takes too long.
        """
        until_s = time.monotonic() + patience_s
        while not is_there():
            if self.process.poll() is not None:
                status = self.process.returncode
                raise Fault(f"the run ended before {what}, with exit status  {status}: {self.last_line()}")
            if time.monotonic() > until_s:
                raise Fault(f"the run did not reach {what} within {patience_s:g} s: {self.last_line()}")
            time.sleep(POLL_S)

    def last_line(self) -> str:
        """The last printed line."""
        lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def count_output_bytes(self) -> int:
        """Bytes of its output."""
        return self._output.stat().st_size

    def ranks(self) -> dict[int, int]:
        """Process ids of its living ranks."""
        ranks = {}
        for path in ranks_of(self.folder).glob("*"):
            with suppress(ValueError, FileNotFoundError):
                if psutil.pid_exists(number := int(path.read_text(encoding="utf-8"))):
                    ranks[int(path.name)] = number
        return ranks

    def know_all(self) -> None:
        """Record its current processes, to detect remaining ones later."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            self._all |= {one.pid: one for one in [launcher, *launcher.children(recursive=True)]}

    def list_remains(self) -> list[str]:
        """Remains after its end: processes, files of launches, the lock of its folder."""
        _, alive = psutil.wait_procs(list(self._all.values()), timeout=LEAVING_S)
        left = [f"process {one.pid}" for one in alive]
        # Torch keeps a folder there for later processes.
        left += [str(path) for path in self._temporary.iterdir() if not path.name.startswith("torchinductor")]
        left += [str(self.folder.lock)] if self.folder.lock.exists() else []
        return left

    def kill_launcher(self) -> None:
        """Kill the launcher by SIGKILL; its ranks end by themselves."""
        self.know_all()
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(list(self._all.values()), timeout=LEAVING_S)
        if alive:
            raise Fault(f"{len(alive)} processes of a killed launcher are still running.")

    def kill_all(self) -> None:
        """Kill all its processes."""
        self.know_all()
        for one in self._all.values():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()

    def end(self) -> int:
        """Request a stop after its step; the exit status."""
        self.know_all()
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise Fault(f"the run did not stop within {PATIENCE_S:g} s.") from error


@contextmanager
def begin(config: RunConfig, place: Path) -> Iterator[FaultyRun]:
    """A run that is killed at the end of the block."""
    run = FaultyRun(config, place)
    run.begin()
    try:
        yield run
    finally:
        run.kill_all()


def hurt(run: FaultyRun, kind: Kind, draw: random.Random) -> FaultOutcome:
    """Inject a fault into a training run, and wait until it trains again.

    Raises:
        Fault: it does not.
    """
    run.know_all()
    if kind in SIGNALS:
        return _hurt_rank(run, kind, draw)
    if kind == "full disk":
        return _fill_disk(run)
    run.wait_for(lambda: len(checkpoints(run.folder.checkpoints)) > 1, "its second checkpoint")
    before = _before(run)
    run.kill_launcher()
    flipped = _flip(run, draw) if kind == "damaged" else None
    run.begin()
    again_s, line = _trains_again(run, before)
    what, wrong = f"the launcher, after step {before.step}", ""
    if flipped is not None:
        what = f"{flipped.parent.name}/{flipped.name}, one bit; then the launcher"
        if not any(flipped.parent.name in passed for passed in line["passed_over"]):
            wrong = f"it resumed from {line['path']} and skipped {line['passed_over'] or 'nothing'}"
    redone = before.step - int(line["step"])
    return FaultOutcome(
        kind=kind, what=what, step=before.step, noticed_s=None, again_s=again_s, redone=redone, wrong=wrong
    )


def _hurt_rank(run: FaultyRun, kind: Kind, draw: random.Random) -> FaultOutcome:
    ranks = run.ranks()
    number = draw.choice(sorted(ranks))
    before = _before(run)
    os.kill(ranks[number], SIGNALS[kind])
    again_s, line = _trains_again(run, before)
    is_named = line["lost"].startswith(f"rank {number}") and FAULT_TEXTS[kind] in line["lost"]
    return FaultOutcome(
        kind=kind,
        what=f"rank {number}",
        step=before.step,
        noticed_s=None if line["lost_at_s"] is None else line["lost_at_s"] - before.at_s,
        again_s=again_s,
        redone=max(0, before.step - int(line["step"])),
        wrong="" if is_named else f"it reported rank {number} as: {line['lost']}",
    )


def _trains_again(run: FaultyRun, after: _Before) -> tuple[float, dict[str, Any]]:
    """Seconds until it had done more steps than before, and its resume event."""
    metrics: dict[str, Any] = {}

    def has_gone_on() -> bool:
        if run.file() == after.file:  # a resumed run writes the file again, without the repeated steps
            return False
        lines = run.tail()
        at = max((number for number, line in enumerate(lines) if line.get("event") == "resumed"), default=None)
        if at is None:
            return False
        metrics.update(lines[at])
        return any(line.get("event") == "step" and line["step"] > after.step for line in lines[at:])

    run.wait_for(has_gone_on, "the next step")
    return time.time() - after.at_s, metrics


def _flip(run: FaultyRun, draw: random.Random) -> Path:
    """Flip a bit of the newest checkpoint, in one of its files of tensors."""
    newest = checkpoints(run.folder.checkpoints)[-1]
    path = draw.choice(sorted(newest.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return path


def _fill_disk(run: FaultyRun) -> FaultOutcome:
    """Limit the launcher, which writes checkpoints, to a page beyond its output; then remove the limit."""
    before, saved = _before(run), checkpoints(run.folder.checkpoints)

    def has_event(event: str, after: int = -1) -> bool:
        return any(line.get("event") == event and line["step"] > after for line in run.tail())

    limits = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (run.count_output_bytes() + FULL_BYTES, limits[1]))
    run.wait_for(lambda: has_event("warning"), "a warning that a checkpoint cannot be written")
    noticed_s, wrong = time.time() - before.at_s, ""
    for place in [place for place in checkpoints(run.folder.checkpoints) if place in saved]:
        try:
            verify(place)
        except StateError as error:
            wrong = wrong or str(error)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, limits)
    run.wait_for(lambda: has_event("saved", before.step), "the next checkpoint")
    return FaultOutcome(
        kind="full disk",
        what="the launcher's files; the run continued, and saved again when there was room",
        step=before.step,
        noticed_s=noticed_s,
        again_s=time.time() - before.at_s,
        redone=0,
        wrong=wrong,
    )


def compare_steps(hurt: FaultyRun, whole: FaultyRun) -> tuple[int, str]:
    """The number of steps compared between a run with faults and one without, and the first difference."""
    wanted = {line["step"]: line for line in whole.steps() if line["event"] == "step"}
    steps = [line for line in hurt.steps() if line["event"] == "step"]
    if [line["step"] for line in steps] != list(range(1, len(steps) + 1)):
        return len(steps), "steps are missing or reported twice"
    for line in steps:
        for name in ("loss", "grad_norm", "lr"):
            if line[name] != wanted.get(line["step"], {}).get(name):
                other = wanted.get(line["step"], {}).get(name)
                return len(steps), f"step {line['step']}: {name} {line[name]}, and {other} undisturbed"
    return len(steps), ""
