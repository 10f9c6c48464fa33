"""Memory and signals: a text of one line costs no more memory than one of many, and nothing long is deaf."""

import json
import os
import signal
import subprocess
import sys
from threading import Event

import pyarrow
import pytest
from pyarrow import parquet

from superstep.data.background import run_aside

LINE = "".join(f"word{i % 977} and {i % 13} of them, " for i in range(200_000))

PROGRAM = """
import resource, sys
from pathlib import Path
from superstep.data.prepare import prepare
from superstep.plan.config import DataConfig

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
corpus = prepare(DataConfig(corpus=(sys.argv[1],)), 300, Path(sys.argv[2]))
print(peak() - before, corpus.manifest.text_bytes)
"""


def write(folder, kind):
    path = folder / f"one.{kind}"
    match kind:
        case "txt":
            path.write_text(LINE)
        case "jsonl":
            path.write_text(json.dumps({"text": LINE}))
        case "parquet":
            parquet.write_table(pyarrow.table({"text": [LINE]}), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_one_line_of_megabytes_is_prepared_in_little_memory(tmp_path, kind):
    command = [sys.executable, "-c", PROGRAM, str(write(tmp_path, kind)), str(tmp_path / "data")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown_kib, text_bytes = map(int, said.split())
    assert text_bytes == len(LINE)
    # Encoded at once it is 80 bytes and more for each character. The sample for the tokenizer holds all of it, and a
    # record is held whole beside it.
    assert grown_kib * 1024 < (180 << 20) + 4 * len(LINE)


def test_what_cannot_be_interrupted_is_not_waited_for():
    never, started = Event(), Event()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def call():
        started.set()
        os.kill(os.getpid(), signal.SIGUSR1)
        never.wait()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_aside(call)
    finally:
        signal.signal(signal.SIGUSR1, before)
        never.set()
    assert started.is_set()


def test_what_a_call_returns_and_raises_comes_back():
    assert run_aside(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_aside(lambda: 1 // 0)
