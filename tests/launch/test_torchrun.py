"""Ranks that join a torchrun launch: one that fails ends at once, and so do those that wait for it."""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import msgspec
import pytest
import torch
import torch.distributed as dist

from superstep.comm.codec import VERSION
from superstep.errors import ConfigError, Fault, UserError
from superstep.launch.torchrun import PREPARED, StoredValue, from_rank_0

pytestmark = pytest.mark.multiproc


NUMBER = StoredValue(msgspec.msgpack.encode, msgspec.msgpack.Decoder(int).decode)


@contextmanager
def _nothing(ranks):
    yield ranks


def _groups():
    """Two, so that ranks can wait in different ones."""
    return [dist.new_group([0, 1]) for _ in range(2)]


def _fails(world, ranks):
    first, second = _groups()
    if world.rank == 1:
        dist.all_reduce(torch.ones(1), group=first, async_op=True)  # which rank 0 never comes to
        raise Fault("planted", rank=1)
    dist.all_reduce(torch.ones(1), group=second)


def _mistaken(world, ranks):
    first, second = _groups()
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), group=first, async_op=True)
        raise ConfigError("planted.")
    dist.all_reduce(torch.ones(1), group=second)


def _is_killed(world, ranks):
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # As a kernel of NCCL keeps its host: no connection that breaks, no signal and no handler ends this wait.
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _well(world, ranks):
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    print(f"rank {world.rank} of {ranks}: {total.item()}\n", end="", flush=True)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_torchrun
from superstep.errors import SuperstepError
from superstep.comm.codec import VERSION
from superstep.launch.torchrun import join, one_world

def terminate(number, frame):
    raise SystemExit(128 + number)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)  # as the command line does: no Python runs while a collective waits
    try:
        join(test_torchrun._nothing, one_world(test_torchrun.{worker}), test_torchrun.NUMBER)
    except SuperstepError as error:
        print("said:", error, file=sys.stderr, flush=True)
        sys.exit(error.exit_status)
"""


@pytest.fixture
def script(tmp_path):
    """Writes the program of a rank."""

    def write(worker):
        path = tmp_path / "rank.py"
        path.write_text(SCRIPT.format(tests=os.path.dirname(__file__), worker=worker.__name__))
        return str(path)

    return write


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _ranks(path):
    """Two ranks, each started by itself as several hosts' are: no launcher tells one of the other's end."""
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, path], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **_PIPES)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], said


_PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize(
    ("worker", "first", "status", "text"),
    [
        (_fails, 1, 1, "said: rank 1: planted"),
        pytest.param(_mistaken, 0, 2, "said: planted.", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_ends_at_once_and_its_peer_with_it(script, worker, first, status, text):
    codes, said = _ranks(script(worker))
    assert codes[first] == status
    assert codes[1 - first] != 0
    assert said[first][1].rstrip().endswith(text)
    assert "said" not in said[1 - first][1], "one report is enough"


def test_ranks_that_do_well_end_well(script):
    codes, said = _ranks(script(_well))
    assert codes == [0, 0], said
    assert [out for out, _ in said] == ["rank 0 of 2: 1.0\n", "rank 1 of 2: 1.0\n"]


@pytest.mark.long
@pytest.mark.parametrize("worker", [pytest.param(_fails, marks=pytest.mark.slow), _is_killed])
def test_torchrun_need_not_kill_a_rank_that_waits(script, worker):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, script(worker)], timeout=120, check=False, **_PIPES)
    assert done.returncode == 1
    assert "rank      : 1 (local_rank: 1)" in done.stderr, done.stderr
    assert "forcefully exiting via" not in done.stderr, "a rank took longer than torchrun's patience"


class _Harm:
    """What runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_bytes_of_the_store_are_never_unpickled(tmp_path):
    store = dist.HashStore()
    for planted in (
        pickle.dumps((_Harm(tmp_path / "harmed"), None)),
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Else"}),
    ):
        store.set(PREPARED, planted)
        with pytest.raises(Fault, match="what rank 0 did not write"):
            from_rank_0(store, 1, None, NUMBER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("problem", "same"),
    [(ConfigError("planted."), UserError), (Fault("planted.", step=3), Fault), (SystemExit(130), SystemExit)],
)
def test_every_rank_raises_what_rank_0_met(problem, same):
    store = dist.HashStore()

    def make():
        raise problem

    with pytest.raises(type(problem)):
        from_rank_0(store, 0, make, NUMBER)
    with pytest.raises(same) as found:
        from_rank_0(store, 1, None, NUMBER)
    assert str(found.value) == str(problem)
