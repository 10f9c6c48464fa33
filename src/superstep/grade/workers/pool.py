"""Pool: graders in several processes, each grade with a deadline.

    pool = Pool("tasks.py", GradeConfig())
    pool.grade(7, seed=0, rollout)          a Verdict; grader_error is tried again first
    pool.submit(7, seed=0, rollout)         the same, as a Future

A grader that hangs is killed at its deadline, a stopped one within seconds; both are started again. An answer that ends
its grader every time is a violation, unless the task alone does: else a model could learn not to be graded.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError, Fault
from superstep.grade.config import GradeConfig, check_config
from superstep.grade.sandbox.cgroup import remove_left_groups
from superstep.grade.sandbox.sandbox import MemoryBound, SandboxMissingError, open_sandbox
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict, grader_error, verdict_from_json, violation
from superstep.hardware.host import cores
from superstep.launch.line_process import LineProcess, explain_no_answer

START_S = 120.0
"""Seconds to load an environment's file."""

COMMAND = (sys.executable, "-P", "-m", "superstep.grade.workers.grader_worker")


def makes_task(process: LineProcess, index: int, seed: int, seconds: float) -> bool:
    """Whether a process can make the task: then it was the answer that ended the processes before."""
    return process.ask({"do": "task", "index": index, "seed": seed}, seconds) is not None


class Pool:
    """Graders of one environment, for any thread.

    Attributes:
        memory_bound: how candidates' programs are held to their memory limit.
        sandbox_fault: why no program can be run; empty if they can.
    """

    def __init__(
        self,
        source: str | Path,
        config: GradeConfig,
        *,
        retried: Callable[[Verdict], None] | None = None,
        is_heard: bool = True,
        needs_sandbox: bool = True,
    ) -> None:
        """Start one grader, to check that the file can be loaded; the others start when they are needed.

        Args:
            retried: called with each grader_error that is tried again.
            is_heard: whether graders print to this process's stderr.
            needs_sandbox: whether a missing sandbox is refused here; otherwise the first grade that runs a program is.

        Raises:
            ConfigError: the file or the sandbox cannot be used.
        """
        self.config = check_config(config)
        self.memory_bound: MemoryBound = "watched"
        self.sandbox_fault = ""
        try:
            self.memory_bound = open_sandbox(config).memory_bound
        except SandboxMissingError as error:
            if needs_sandbox:
                raise
            self.sandbox_fault = str(error)
        self._retried = retried or (lambda verdict: None)
        self.workers = config.workers or cores()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all = [_Worker(Path(source), config, self.sandbox_fault, is_heard=is_heard) for _ in range(self.workers)]
        self._threads = ThreadPoolExecutor(self.workers, "grade")
        for worker in self._all:
            self._idle.put(worker)
        try:
            self._threads.submit(self._all[-1].ensure_started).result()
        except BaseException:
            self.close()
            raise

    def grade(self, index: int, seed: int, rollout: Rollout) -> Verdict:
        """The verdict of a rollout; raises what the future of ``submit`` raises."""
        return self.submit(index, seed, rollout).result()

    def submit(self, index: int, seed: int, rollout: Rollout) -> Future[Verdict]:
        """A future of the verdict. Its ``result`` raises a ConfigError where the file has no such task, or
        the grade runs a program without a sandbox.
        """
        if rollout.violation:
            return self._threads.submit(violation, rollout.violation)
        request = {
            "index": index,
            "seed": seed,
            "turns": [[turn.role, turn.content] for turn in rollout.turns],
            "finish": rollout.finish,
        }
        return self._threads.submit(self._grade, request)

    def close(self) -> None:
        """End all graders and their programs."""
        for worker in self._all:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()
        if self.memory_bound == "cgroup":
            remove_left_groups()  # of graders that were killed

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(self, request: dict[str, Any]) -> Verdict:
        worker = self._idle.get()
        begin_s = time.time()
        try:
            verdict = worker.ask(request)
            ends = int(worker.has_ended)
            for _ in range(self.config.retries):
                if verdict.is_decided:
                    break
                self._retried(verdict)
                verdict = worker.ask(request)
                ends += worker.has_ended
            if 1 < ends == self.config.retries + 1 and worker.has_task(request["index"], request["seed"]):
                verdict = violation(f"its grader's process ended {ends} times, and not without this answer")
            return replace(verdict, graded_s=(begin_s, time.time()))
        finally:
            self._idle.put(worker)


class _Worker:
    """One thread of the pool with its grader process."""

    def __init__(self, source: Path, config: GradeConfig, sandbox_fault: str, *, is_heard: bool) -> None:
        self._source, self._config, self._is_heard = source, config, is_heard
        self._sandbox_fault = sandbox_fault
        self._process: LineProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self.has_ended = False
        """Whether the process ended by itself at the last attempt: neither late nor stopped."""

    def ensure_started(self) -> LineProcess:
        """The process, started if necessary.

        Raises:
            ConfigError: the environment's file cannot be used.
            Fault: the process does not start.
        """
        if self._process is not None and self._process.is_there:
            return self._process
        self._end()
        with self._lock:
            if self._is_closed:
                raise Fault("the pool of graders is closed.")
            process = self._process = LineProcess(COMMAND, is_heard=self._is_heard)
        start = {"path": str(self._source), "config": asdict(self._config), "sandbox_fault": self._sandbox_fault}
        reply = process.ask(start, START_S)
        if reply is None:
            self._end()
            raise Fault(f"the grader of {self._source} does not start: {explain_no_answer(process, START_S)}.")
        if "refused" in reply:
            self._end()
            raise ConfigError(reply["refused"])
        return process

    def ask(self, request: dict[str, Any]) -> Verdict:
        """Make one attempt; raises ConfigError where the file has no such task."""
        seconds = self._config.grader_timeout_s
        self.has_ended = False
        try:
            process = self.ensure_started()
        except Fault as error:
            return grader_error(str(error))
        reply = process.ask(request, seconds)
        if reply is None:
            self.has_ended = process.has_ended and not self._is_closed
            self._end()
            return grader_error(explain_no_answer(process, seconds))
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        return verdict_from_json(reply)

    def has_task(self, index: int, seed: int) -> bool:
        """Whether a process can make the task, without seeing the answer."""
        try:
            is_made = makes_task(self.ensure_started(), index, seed, self._config.grader_timeout_s)
        except Fault:
            return False
        if not is_made:
            self._end()  # it may be there still, and would answer the next question no more
        return is_made

    def kill(self) -> None:
        """End the process for good, from any thread; a waiting call returns."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process once no call uses it."""
        self.kill()
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
