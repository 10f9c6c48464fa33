"""Memory and signals: a text of one line costs no more memory than one of many, and nothing long is deaf."""

import json
import os
import resource
import signal
from threading import Event

import pyarrow
import pytest
from pyarrow import parquet

from longer import longer
from pool import IMPORTED
from superstep.data.interruptible import run_aside
from superstep.data.preparation.prepare import prepare
from superstep.launch.fork_server import fork_context
from superstep.plan.config import DataConfig


def line():
    return "".join(f"word{i % 977} and {i % 13} of them, " for i in range(200_000))


def write(folder, kind):
    """The file, and how long its line is."""
    path, text = folder / f"one.{kind}", line()
    match kind:
        case "txt":
            path.write_text(text)
        case "jsonl":
            path.write_text(json.dumps({"text": text}))
        case "parquet":
            parquet.write_table(pyarrow.table({"text": [text]}), path)
    return path, len(text)


def grown(pipe, path, folder):
    """What preparing adds to the most memory that this process had: a new one, which has torch and nothing else."""

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = peak()
    corpus = prepare(DataConfig(corpus=(str(path),)), 300, folder)
    pipe.send((peak() - before, corpus.manifest.text_bytes))


@pytest.mark.parametrize("kind", longer(["txt", "jsonl", "parquet"], lambda kind: kind != "jsonl"))
def test_one_line_of_megabytes_is_prepared_in_little_memory(tmp_path, kind):
    path, length = write(tmp_path, kind)
    forks = fork_context(IMPORTED)
    here, there = forks.Pipe(duplex=False)
    process = forks.Process(target=grown, args=(there, path, tmp_path / "data"))
    process.start()
    there.close()
    grown_kib, text_bytes = here.recv()
    process.join()
    assert text_bytes == length
    # Encoded at once it is 80 bytes and more for each character. The sample for the tokenizer holds all of it, and a
    # record is held whole beside it.
    assert grown_kib * 1024 < (180 << 20) + 4 * length


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
