"""Ranks for tests: processes that outlive a test, so that their seconds of start are paid once.

    pool.run(4, job, x)     calls job(rank, 4, x) on four ranks inside a Gloo process group of theirs

A job is a function of a module, and what it takes and returns can be pickled. A rank that fails, hangs or dies fails
the run with its text; ranks that did not come back by themselves are killed and replaced at the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from superstep.launch.fork_server import fork_context, heed_all

GRACE_S = 3.0
"""Once a rank has failed, how long the others have to notice: Gloo tells them within milliseconds, or never."""

IMPORTED = [
    "pytest",
    "superstep.train.proof.proof_inputs",
    "superstep.train.proof.prove_exact",
    "superstep.run.rank",
]
"""What a process imports once, of which each rank is then a fork: none waits for torch, and they share its memory."""

START_S = 120.0
"""How long a rank may take to import torch: seconds, more where every core is busy."""


M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
"""Options of mallopt."""


class RankError(Exception):
    """Ranks of a run failed, hung or died; the text says which and why, the first cause first."""


class _Rank:
    """One worker process, as the pool sees it."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, stacks: Path) -> None:
        self.stacks = stacks
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def where(self) -> str:
        """The stack of each of its threads, by its own handler of SIGUSR1."""
        before = self.stacks.stat().st_size if self.stacks.exists() else 0
        if self.process.pid is None or not self.stacks.exists():
            return "it was still starting"
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text(errors="replace")[before:] or "its stack could not be had"


class Pool:
    """Up to ``size`` ranks; they start when first needed."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._context = fork_context(IMPORTED)  # of which the ranks are forks that tests launch as well
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks: list[_Rank] = []
        self._runs = 0
        self._started = 0

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> list[Any]:
        """``fn(rank, world, *args)`` on each rank; what they return, by rank.

        Raises:
            RankError: a rank raised, died, or had not answered after ``timeout_s`` (starting a rank not counted).
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world = {world} must be in 1 to {self.size}, the size of the pool.")
        self._grow(world)
        self._runs += 1
        store = self._folder / f"store-{self._runs}"
        call = pickle.dumps((fn, args))
        for number, rank in enumerate(self._ranks[:world]):
            rank.pipe.send((number, world, str(store), timeout_s, sys.path, call))
        try:
            answers, troubles = self._collect(world, time.monotonic() + timeout_s)
        except BaseException:  # Ctrl-C, or a test's own time limit: a later run must not read this one's answers
            for rank in self._ranks[:world]:
                rank.kill()
            raise
        finally:
            store.unlink(missing_ok=True)
        if troubles:
            raise RankError("\n".join(troubles))
        return [pickle.loads(answers[number]) for number in range(world)]

    def alive(self, world: int) -> bool:
        """Whether any of the first ranks has not ended."""
        return any(rank.process.is_alive() for rank in self._ranks[:world])

    def close(self) -> None:
        """Ends every rank."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, world: int) -> None:
        """Starts what is missing, and waits until each rank has imported torch."""
        fresh = []
        for number in range(world):
            if number < len(self._ranks) and self._ranks[number].process.is_alive():
                continue
            self._started += 1
            rank = _Rank(self._context, self._folder / f"stacks-{self._started}")
            self._ranks[number : number + 1] = [rank]
            fresh.append(rank)
        for rank in fresh:
            try:
                if not rank.pipe.poll(START_S):
                    raise RankError(f"a rank did not start within {START_S:.0f} s")
                rank.pipe.recv()
            except EOFError as error:
                raise RankError("a rank died while it started") from error

    def _collect(self, world: int, deadline: float) -> tuple[dict[int, bytes], list[str]]:
        """The answers by rank, and what went wrong in the order it was seen. Kills the ranks that owe an answer."""
        waiting = {rank.pipe: (number, rank) for number, rank in enumerate(self._ranks[:world])}
        answers: dict[int, bytes] = {}
        troubles: list[str] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number, rank = waiting.pop(pipe)
                try:
                    is_good, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    rank.kill()
                    troubles.append(f"rank {number} died with exit status {rank.process.exitcode}")
                else:
                    if is_good:
                        answers[number] = answer
                    else:
                        troubles.append(f"rank {number} raised\n{answer}")
            if troubles:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for number, rank in waiting.values():
            troubles.append(f"rank {number} did not answer in time; it was at\n{rank.where()}")
            rank.kill()
        return answers, troubles


def _serve(pipe: Connection, stacks: str) -> None:
    """What a worker does until its pipe closes."""
    heed_all()
    # A machine without a name server cannot look itself up, which Gloo does unless told its interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pool
    _keep_memory()
    import torch
    import torch.distributed as dist

    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        pipe.send("ready")
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                rank, world, store, timeout_s, path, call = pipe.recv()
                sys.path.extend(folder for folder in path if folder not in sys.path)
                torch.set_num_threads(1)
                try:
                    # Told before the connections go: what the others say of these comes after the cause.
                    pipe.send(_answer(rank, world, store, timeout_s, call))
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()


def _keep_memory() -> None:
    """Tensors that are freed stay with the process: given back, each page would be found and zeroed anew at every step,
    which took a third of the seconds where vocabularies are large. glibc alone has the call.
    """
    _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**30})


def give_memory_back() -> None:
    """As processes do that are no ranks of a pool, for a job that looks at its memory."""
    _set_malloc({M_MMAP_MAX: 2**16, M_TRIM_THRESHOLD: 2**17})


def _set_malloc(options: dict[int, int]) -> None:
    if sys.platform == "linux":
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)


def _answer(rank: int, world: int, store: str, timeout_s: float, call: bytes) -> tuple[bool, Any]:
    import torch.distributed as dist

    try:
        fn, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        return True, pickle.dumps(fn(rank, world, *args))
    except BaseException:  # noqa: BLE001  the parent gets it as text, whatever it is
        return False, traceback.format_exc()
