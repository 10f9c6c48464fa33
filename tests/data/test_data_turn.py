"""Two processes and one unprepared folder of tokens: one prepares it, the other waits, says so, and uses it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import runs
from superstep.data.preparation.prepare_lock import LOCK, take_turn
from superstep.data.token_files import open_corpus

PREPARE = """
import sys
from pathlib import Path
from unittest import mock
from superstep.data.preparation import prepare
from superstep.plan.config import DataConfig

built = prepare._Preparation.build

def build(*args):
    print("building", flush=True)
    if sys.argv[1] == "slow":
        sys.stdin.readline()
    built(*args)
    print("built", flush=True)

config = DataConfig(corpus=("good.txt",), sequence_tokens=32)
with mock.patch.object(prepare._Preparation, "build", build):
    corpus = prepare.prepare(config, 300, Path("cache/of/two"), tell=lambda line: print(line, flush=True))
print("open", corpus.manifest.train_tokens, flush=True)
"""


def _start(place, kind):
    return subprocess.Popen([sys.executable, "-c", PREPARE, kind], cwd=place, stdin=-1, stdout=-1, stderr=-1, text=True)


@pytest.fixture
def place(tmp_path):
    runs.make_files(tmp_path)
    return tmp_path


def test_the_second_waits_for_the_first_and_uses_what_it_made(place):
    with _start(place, "slow") as first:
        assert first.stdout.readline() == "building\n"
        with _start(place, "fast") as second:
            waits = second.stdout.readline()
            assert waits.startswith(f"Waiting for process {first.pid} on ")
            assert waits.endswith(", which prepares the tokens in cache/of/two ...\n")
            said, trouble = first.communicate("go on\n", timeout=60)
            assert said.startswith("built\nopen "), trouble
            said_second, trouble = second.communicate(timeout=60)
            assert said_second == said.removeprefix("built\n"), trouble
    assert open_corpus(place / "cache/of/two").manifest.train_tokens > 0
    assert not (place / "cache/of/two" / LOCK).exists()


def test_a_killed_process_keeps_nobody_waiting(place):
    with _start(place, "slow") as first:
        assert first.stdout.readline() == "building\n"
        with _start(place, "fast") as second:
            assert second.stdout.readline().startswith("Waiting for ")
            first.kill()
            said, trouble = second.communicate(timeout=60)
            assert said.startswith("building\nbuilt\nopen "), trouble


def test_one_at_a_time_however_many_come(tmp_path):
    inside, most, done = [], [], []

    def take():
        for _ in range(20):
            with take_turn(tmp_path / "new"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                done.append(1)

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(take) for _ in range(4)]:
            each.result()
    assert len(done) == 80
    assert max(most) == 1
    assert not (tmp_path / "new" / LOCK).exists()


def test_a_folder_in_which_nothing_was_made_is_removed_again(tmp_path):
    (tmp_path / "mine").mkdir()
    with take_turn(tmp_path / "mine" / "deep" / "er"):
        assert (tmp_path / "mine" / "deep" / "er" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not list((tmp_path / "mine").iterdir())
    with take_turn(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


def test_a_folder_that_cannot_be_made_is_left_to_who_writes_there():
    with take_turn(Path("/proc/nowhere")):
        assert not os.path.exists("/proc/nowhere")
