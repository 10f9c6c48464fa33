"""Hurting ranks of a run that this process launches: killed, stopped, or made to hang in code that is not Python."""

import json
import multiprocessing
import os
import signal
import threading
import time

from superstep.cli.prove.fault_injection import HANG

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hung": HANG}


class Hurter(threading.Thread):
    """Hurts ranks of the run in a folder, each once the metrics say that so many steps are done.

    Attributes:
        done: what was done, and the seconds of the host's clock when.
        training: when metrics had another step after each.
    """

    def __init__(self, folder, hurts):
        super().__init__(daemon=True)
        self._metrics, self._hurts = folder / "metrics.jsonl", list(hurts)
        self.done, self.training = [], []

    def run(self):
        deadline_s = time.monotonic() + 240
        while self._hurts and time.monotonic() < deadline_s:
            time.sleep(0.005)
            how, name, step = self._hurts[0]
            ranks = {process.name: process.pid for process in multiprocessing.active_children()}
            if name in ranks and self.steps() >= step:
                os.kill(ranks[name], SIGNALS[how])
                self.done.append((self._hurts.pop(0), time.time()))
                while self._count("resumed") < len(self.done) and time.monotonic() < deadline_s:
                    time.sleep(0.005)
                here = self.steps()
                while self.steps() <= here and time.monotonic() < deadline_s:
                    time.sleep(0.005)
                self.training.append(time.time())

    def steps(self):
        return self._count("step")

    def _count(self, event):
        try:
            lines = self._metrics.read_text().splitlines()
        except OSError:
            return 0
        return sum(f'"event": "{event}"' in line for line in lines)


def resumed(folder):
    """What a run's metrics say of ranks that were lost."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == "resumed" and line["lost"]]
