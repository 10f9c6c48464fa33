"""The prefetcher gives the stream's batches in order, says what was waited for, and leaves nothing behind."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from superstep.data.batch import Batch
from superstep.data.prefetch import Prefetcher
from superstep.errors import ConfigError


class Counting:
    """A stream whose batch at cursor s holds the number s."""

    batch_sequences = 4

    def __init__(self, delay_s: float = 0.0, fails_at: int | None = None) -> None:
        self.delay_s = delay_s
        self.fails_at = fails_at
        self.read: list[int] = []

    def batch(self, sample: int, rows: slice) -> Batch:
        time.sleep(self.delay_s)
        if sample == self.fails_at:
            raise RuntimeError(f"cannot read {sample}")
        self.read.append(sample)
        number = torch.full((rows.stop - rows.start, 2), sample)
        return Batch({"tokens": number}, number, 8)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert is_so()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    wait_until(lambda: all(thread.name != "superstep-prefetch" for thread in threading.enumerate()))


def prefetch(stream: Counting, *, depth: int = 2, steps: int | None = None) -> Prefetcher:
    return Prefetcher(stream, start_sample=8, rows=slice(1, 3), depth=depth, steps=steps)


def cursors(found) -> list[int]:
    return [int(batch.tokens_BS[0, 0]) for batch, _ in found]


def test_batches_come_in_order_from_the_start_sample():
    with prefetch(Counting()) as batches:
        assert cursors(itertools.islice(batches, 50)) == list(range(8, 208, 4))


def test_the_iteration_ends_after_its_steps():
    for steps in (0, 1, 5):
        with prefetch(Counting(), steps=steps) as batches:
            assert cursors(batches) == [8 + 4 * step for step in range(steps)]
            assert cursors(batches) == []


def test_no_more_than_depth_is_read_ahead():
    stream = Counting()
    with prefetch(stream, depth=3) as batches:
        for ahead in ([8, 12, 16], [8, 12, 16, 20]):
            wait_until(lambda ahead=ahead: len(stream.read) >= len(ahead))
            time.sleep(0.05)
            assert stream.read == ahead
            next(batches)


def test_the_wait_is_the_time_the_caller_waited():
    with prefetch(Counting(delay_s=0.1)) as batches:
        _, first_wait_s = next(batches)
        time.sleep(0.25)
        _, second_wait_s = next(batches)
    assert second_wait_s < 0.05 < first_wait_s


def test_an_error_of_the_thread_is_raised_after_the_batches_before_it():
    with prefetch(Counting(fails_at=16), depth=5) as batches:
        assert cursors(itertools.islice(batches, 2)) == [8, 12]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot read 16"):
                next(batches)


def test_close_is_prompt_with_a_full_and_with_an_empty_shelf_and_may_be_repeated():
    for delay_s, pause_s in ((0.0, 0.05), (0.1, 0.0)):
        batches = prefetch(Counting(delay_s=delay_s))
        time.sleep(pause_s)
        began_s = time.monotonic()
        batches.close()
        assert time.monotonic() - began_s < 1
        batches.close()
        assert list(batches) == []


def test_an_error_in_the_with_block_ends_the_thread():
    with pytest.raises(KeyError), prefetch(Counting()):
        raise KeyError


def test_nothing_keeps_a_closed_prefetcher_or_its_stream_alive():
    stream = Counting()
    with prefetch(stream) as batches:
        next(batches)
    gone = [weakref.ref(batches), weakref.ref(stream)]
    del batches, stream
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_depth_of_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"data.prefetch_steps = 0 reads nothing ahead; set it to 1 or more"):
        prefetch(Counting(), depth=0)
