"""Threads of a process that use one emulated GPU: what a wait orders, when memory is free again, how queues end."""

import threading

import pytest
import torch
from test_strict_device import GPU, device, run_alone  # noqa: F401 - a fixture

pytestmark = pytest.mark.strict


def test_a_wait_orders_no_task_that_another_thread_issued_behind_it(device):  # noqa: F811
    first, second = threading.Event(), threading.Event()
    x, y = torch.ones(8, device=GPU), torch.ones(8, device=GPU)
    torch.cuda.synchronize()
    number = device.add_communicator(0, 0)
    queue = torch.cuda.Stream(stream_id=number, device_index=0, device_type=1)
    device.launch(number, [], [x], lambda *_: first.wait(), "first")
    waiting = threading.Thread(target=queue.synchronize)
    waiting.start()
    while not any("stream.synchronize" in wait for wait in device.take_host_waits()):
        pass
    device.launch(number, [], [y], lambda *_: second.wait(), "second")
    first.set()
    waiting.join()
    assert (x + 1).tolist() == [2.0] * 8
    with pytest.raises(RuntimeError, match=r"race: aten::add.* reads.* second .*writes"):
        y + 1
    second.set()
    queue.synchronize()
    device.close(number)


@pytest.mark.parametrize("waits", [False, True])
def test_what_one_thread_has_waited_for_counts_for_all(device, waits):  # noqa: F811
    """The limit that docs/howto/emulate-gpus.md states: where the thread has waited, the race is not named."""
    x, side = torch.zeros(1000, device=GPU), torch.cuda.Stream()
    torch.cuda.synchronize()
    is_over = []

    def fill():
        with torch.cuda.stream(side):
            x.add_(1)
        if waits:
            side.synchronize()
        is_over.append(True)

    threading.Thread(target=fill).start()
    while not is_over:  # it is later, and nothing but chance says so
        pass
    if waits:
        assert (x + 1).tolist() == [2.0] * 1000
    else:
        with pytest.raises(RuntimeError, match=r"race: aten::add\..* reads .* writes on"):
            x + 1
    torch.cuda.synchronize()


def use_on_two_streams(is_ordered):
    """Memory that two streams use and that is recorded on the second one alone, freed."""
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(1000, device=GPU)
    for stream in (one, other):
        stream.wait_stream(torch.cuda.current_stream())
        if is_ordered:
            stream.wait_stream(one)
        with torch.cuda.stream(stream):
            x + 1
    x.record_stream(other)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_stream_that_is_recorded_keeps_what_comes_before_it_and_no_more(device, is_ordered):  # noqa: F811
    use_on_two_streams(is_ordered)
    races = device.take_races()
    assert len(races) == (0 if is_ordered else 1), races
    assert is_ordered or "neither record_stream nor an event keeps it" in races[0]


def test_memory_that_runs_out_is_waited_for_where_other_streams_are_recorded():
    done = run_alone(
        """
        from superstep.strict.load import configure
        import strict_device
        configure(strict_device, Settings(device_bytes=1 << 20, order="latest"))
        side = torch.cuda.Stream()
        x = torch.empty(600_000, dtype=torch.uint8, device=d)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(1)
        x.record_stream(side)
        del x
        print(len(torch.empty(700_000, dtype=torch.uint8, device=d)))
        """
    )
    assert done.stdout == "700000\n", done.stderr


@pytest.mark.parametrize("is_running", [False, True])
def test_an_aborted_queue_lets_go_of_the_tensors_of_its_tasks(is_running):
    """Their last references are those of tasks that never run."""
    done = run_alone(
        f"""
        import strict_device, threading
        number, go, began = strict_device.add_communicator(0, 0), threading.Event(), threading.Event()
        queue = torch.cuda.Stream(stream_id=number, device_index=0, device_type=1)
        held = strict_device.add_communicator(0, 0)
        strict_device.launch(number if {is_running} else held, [], [], lambda *_: began.set() or go.wait(), "first")
        queue.wait_stream(torch.cuda.Stream(stream_id=held, device_index=0, device_type=1))
        began.wait()
        x = torch.ones(1000, device=d)
        queue.wait_stream(torch.cuda.current_stream())
        strict_device.launch(number, [x], [], lambda *_, x=x: None, "second")
        del x
        strict_device.abort(number)
        go.set()
        strict_device.close(number)
        while torch.cuda.memory_allocated():
            pass
        print("ended")
        """
    )
    assert done.stdout == "ended\n", done.stderr


def test_who_waits_after_the_end_is_told_so():
    done = run_alone("import strict_device\nx = torch.ones(8, device=d)\nstrict_device.stop()\nx.sum().item()")
    assert "a GPU whose threads ended with the interpreter" in done.stderr
