"""Samples of a model after each checkpoint, for the report of its run.

    ranks      ─ train ─ save 100 ─ train ─────────────────── save 200 ─ ...
    launcher              └─ superstep sample RUN PROMPT --step 100 ──► RUN/samples.jsonl

A separate process samples, with one thread, no GPU and low priority, so that training continues; it reads the
checkpoint like any other. Checkpoints that come meanwhile wait, and only the newest of them is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from superstep.observe.jsonl import read
from superstep.run.reports.report import leave_report
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.train.run_folder.run_paths import RunFolder

TOKENS = 64
POLL_S = 0.25
NICE = 10


@contextmanager
def sampling(folder: RunFolder, prompt: str | None) -> Iterator[Callable[[], None]]:
    """Within the block samples are written. The yielded function waits for that of the last checkpoint, and adds all of
    them to the report; without its call, a running sample is given up.

    Args:
        folder: of the run.
        prompt: to continue; None writes nothing.
    """
    if prompt is None:
        yield lambda: None
        return
    samples = _Samples(folder, prompt)
    try:
        yield samples.finish
    finally:
        samples.end()


class _Samples:
    def __init__(self, folder: RunFolder, prompt: str) -> None:
        self._folder, self._prompt = folder, prompt
        sampled = {line["step"] for line in read(folder.samples)} if folder.samples.is_file() else set()
        self._done = {each for each in self._list_checkpoints() if each[0] in sampled}
        self._is_last, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="superstep-samples", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last one, and write the report again."""
        self._is_last.set()
        self._thread.join()
        leave_report(self._folder)  # if it cannot, the ranks' own page stays

    def end(self) -> None:
        """Give up the running sample."""
        self._is_over.set()
        self._is_last.set()
        self._thread.join()

    def _list_checkpoints(self) -> set[tuple[int, int]]:
        """Checkpoints by their step and folder: a run after a rollback makes another one of the same name."""
        kept = set()
        for place in checkpoints(self._folder.checkpoints):
            with suppress(OSError):  # it has just been removed
                kept.add((step_of(place), place.stat().st_ino))
        return kept

    def _run(self) -> None:
        while not self._is_over.is_set():
            is_last = self._is_last.is_set()
            newest = max(self._list_checkpoints(), default=None)
            if newest is not None and newest not in self._done:
                self._done.add(newest)
                self._sample(newest[0])
            elif is_last:
                return
            else:
                self._is_last.wait(POLL_S)

    def _sample(self, step: int) -> None:
        words = ["sample", str(self._folder.root), self._prompt, "--step", str(step), "--tokens", str(TOKENS)]
        process = subprocess.Popen(
            ["env", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1", sys.executable, "-m", "superstep", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        output = self._output_of(process)
        if output is None:
            return
        out, errors = (text.decode(errors="replace").rstrip("\n") for text in output)
        if process.returncode == 0:
            self._tell({"step": step, "text": out})
        elif step in dict(self._list_checkpoints()):  # else it was removed meanwhile, by a newer one
            self._tell({"step": step, "why": errors.rpartition("\n")[2] or f"exit status {process.returncode}"})

    def _output_of(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes] | None:
        while True:
            try:
                return process.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                if self._is_over.is_set():
                    process.kill()
                    process.communicate()
                    return None

    def _tell(self, line: dict[str, object]) -> None:
        with suppress(OSError), self._folder.samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
