import errno
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from reported import ROUTERS, STARTED, STEP
from superstep.errors import Fault
from superstep.observe.events import Evaluated, Fanout, Resumed, RunFinished, Saved
from superstep.observe.jsonl import JsonLines, damage, drop_after, line, read
from superstep.observe.tail_jsonl import GrowingFile
from superstep.observe.tensorboard import TensorBoard, record


def steps(first, last):
    return [replace(STEP, step=step, loss=10.0 / step) for step in range(first, last + 1)]


def write_all(sink, events):
    for event in events:
        sink.write(event)
    sink.close()


def test_events_are_values():
    assert replace(STEP) == STEP
    with pytest.raises(FrozenInstanceError):
        STEP.loss = 0.0


# ── metrics.jsonl ──


def test_a_step_line_has_the_promised_keys(tmp_path):
    write_all(JsonLines(tmp_path / "metrics.jsonl"), [STARTED, STEP])
    started, step = read(tmp_path / "metrics.jsonl")
    assert started["event"] == "started"
    assert step["event"] == "step"
    assert {"step", "loss", "tokens_per_s", "step_s", "data_s", "mfu", "grad_norm", "lr"} <= step.keys()
    assert step["loss"] == 6.25


@given(st.floats(), st.none() | st.floats())
def test_every_line_is_valid_json_whatever_the_numbers(loss, mfu):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = line(replace(STEP, loss=loss, mfu=mfu))
    assert text.count(b"\n") == 1
    found = json.loads(text, parse_constant=refuse)
    finite = loss == loss and abs(loss) != float("inf")
    assert found["loss"] == (loss if finite else None)


@given(st.floats())
def test_a_number_within_a_list_may_be_anything_too(balance):
    found = json.loads(line(replace(ROUTERS, balance=(balance, 1.0))), parse_constant=pytest.fail)
    assert found["chosen"] == [[6, 2, 0, 0], [2, 2, 2, 2]]
    assert found["balance"] == [balance if balance - balance == 0 else None, 1.0]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    """A process that ends without closing anything loses no line."""
    script = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r});"
        "from pathlib import Path; from test_observe import *;"
        f"sink = JsonLines(Path({str(tmp_path / 'm.jsonl')!r})); sink.write(STEP); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=False)
    assert [found["step"] for found in read(tmp_path / "m.jsonl")] == [1]


def test_a_resumed_run_leaves_the_file_of_one_that_never_stopped(tmp_path):
    straight, stopped = tmp_path / "straight.jsonl", tmp_path / "stopped.jsonl"
    write_all(JsonLines(straight), steps(1, 6))
    write_all(JsonLines(stopped), [*steps(1, 3), Saved(step=3, path="c", seconds=0.1, bytes=9), *steps(4, 5)])
    write_all(JsonLines(stopped), [Resumed(step=3, path="c"), *steps(4, 6)])
    kinds = [(found["event"], found["step"]) for found in read(stopped)]
    assert kinds == [
        *(("step", s) for s in (1, 2, 3)),
        ("saved", 3),
        ("resumed", 3),
        *(("step", s) for s in (4, 5, 6)),
    ]
    only_steps = [text for text in stopped.read_bytes().splitlines() if b'"event": "step"' in text]
    assert only_steps == straight.read_bytes().splitlines()


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 9), st.binary(max_size=40))
def test_dropping_keeps_the_bytes_of_earlier_lines_in_order(tmp_path_factory, numbers, last, torn):
    path = tmp_path_factory.mktemp("drop") / "m.jsonl"
    spaced = [b'{"step":   %d, "loss": 1.50}\n' % number for number in numbers]
    path.write_bytes(b"".join(spaced) + b'{"step": 0, "lo' + torn.replace(b"\n", b""))
    drop_after(path, last)
    kept = [text for text, number in zip(spaced, numbers, strict=True) if number <= last]
    assert path.read_bytes() == b"".join(kept)


def test_a_torn_last_line_spoils_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(line(STEP) + line(replace(STEP, step=2))[:-20])
    write_all(JsonLines(path), steps(2, 2))
    assert [found["step"] for found in read(path)] == [1, 2]
    assert path.read_bytes().startswith(line(STEP))


def _damaged(path, at=2, count=4):
    texts = [line(replace(STEP, step=step)) for step in range(1, count + 1)]
    texts[at - 1] = texts[at - 1].replace(b'"step":', b'"step"\xba', 1)
    path.write_bytes(b"".join(texts))
    return texts


def test_a_damaged_line_is_told_by_its_number_and_kept_when_a_run_goes_on(tmp_path):
    path = tmp_path / "m.jsonl"
    texts = _damaged(path)
    said = f"{path}: line 2 cannot be read, and what it told is left out; put it back from a copy."
    assert damage(path) == said
    with path.open("ab") as file:
        file.write(line(replace(STEP, step=5))[:-20])
    assert damage(path) == said, "a last line may be under way"
    sink = JsonLines(path)
    sink.write(Resumed(step=3, path=""))
    sink.close()
    assert path.read_bytes().startswith(b"".join(texts[:3]) + b'{"event": "resumed"')
    assert damage(path) == said
    with path.open("ab") as file:
        file.write(b"\n" * 12)
    assert "13 lines cannot be read (2, 5, 6, 7, 8, 9, 10, 11, 12, 13, ...)" in damage(path)


def test_a_damaged_line_is_told_of_a_file_that_grows(tmp_path):
    path = tmp_path / "m.jsonl"
    grown = GrowingFile(path)
    texts = _damaged(path, at=3)
    path.write_bytes(b"".join(texts[:2]) + texts[2][:30])
    assert [len(grown.read()), grown.damage()] == [2, ""]
    path.write_bytes(b"".join(texts))
    assert len(grown.read()) == 3
    assert grown.damage() == damage(path) != ""


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(line(STEP)[:-1])
    drop_after(path, 1)
    assert path.read_bytes() == line(STEP)


def test_a_crash_while_dropping_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write_all(JsonLines(path), steps(1, 5))
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Fault, match=r"m\.jsonl cannot be written: No space left"):
        drop_after(path, 2)
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_fault_that_names_path_and_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonLines(path)
    with pytest.raises(Fault, match=r"step 7: .*/metrics\.jsonl cannot be written: No space left on device"):
        sink.write(replace(STEP, step=7))
    sink.close()


def test_lines_wait_for_a_disk_that_does_not_take_them(tmp_path, monkeypatch):
    warnings = []
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, most_waiting_bytes=10_000, warn=warnings.append)
    sink.write(STEP)
    taken = [7]  # bytes, before it is full

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            count = min(len(data), taken[0])
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken[0] -= count
            return self._file.write(data[:count])

        def close(self):
            self._file.close()

    sink._file._file = Full(sink._file._file)
    for step in (2, 3):
        sink.write(replace(STEP, step=step))
    (told,) = warnings
    assert (
        told == f"{path} cannot be written: No space left on device; make room on its disk. Its lines wait in memory."
    )
    assert [found["step"] for found in read(path)] == [STEP.step]
    taken[0] = 1 << 20
    sink.write(replace(STEP, step=4))
    sink.close()
    assert [(found["event"], found["step"]) for found in read(path)] == [
        ("step", STEP.step), ("step", 2), ("warning", 2), ("step", 3), ("step", 4),
    ]  # fmt: skip
    assert len(path.read_bytes().splitlines()) == 5


def test_a_path_that_cannot_be_opened_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Fault, match=r"Not a directory|File exists"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


# ── TensorBoard ──


def curves(folder):
    """What TensorBoard itself reads: it checks every checksum."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return {tag: [(p.step, p.value) for p in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_reads_the_curves_that_were_written(tmp_path):
    evaluated = Evaluated(step=2, loss=5.5, bits_per_byte=1.5, seconds=0.1)
    write_all(TensorBoard(tmp_path), [STARTED, *steps(1, 2), evaluated])
    found = curves(tmp_path)
    assert found["train/loss"] == [(1, 10.0), (2, 5.0)]
    assert found["train/lr"] == [(1, pytest.approx(1e-3)), (2, pytest.approx(1e-3))]
    assert found["validation/loss"] == [(2, 5.5)]
    assert found["validation/bits_per_byte"] == [(2, 1.5)]
    assert found["memory/peak_bytes"][0] == (1, float(1 << 30))


def test_tensorboard_plots_what_routers_did(tmp_path):
    write_all(TensorBoard(tmp_path), [ROUTERS])
    assert curves(tmp_path) == {
        "router/dropped_share": [(2, 0.125)],
        "router/balance": [(2, 1.75)],
        "router/z": [(2, 3.5)],
        "router_busiest/layer_0": [(2, 3.0)],
        "router_busiest/layer_1": [(2, 1.0)],
    }


def test_a_missing_figure_is_no_point(tmp_path):
    missing = Evaluated(step=1, loss=5.5, bits_per_byte=None, seconds=0.1)
    write_all(TensorBoard(tmp_path), [replace(STEP, mfu=None), missing])
    assert not {"speed/mfu", "validation/bits_per_byte"} & curves(tmp_path).keys()


def test_resumed_curves_have_each_step_once(tmp_path):
    write_all(TensorBoard(tmp_path, clock=lambda: 1000.0), steps(1, 5))
    again = [replace(event, loss=-1.0) for event in steps(4, 6)]
    write_all(TensorBoard(tmp_path, clock=lambda: 2000.0), [Resumed(step=3, path="c"), *again])
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in curves(tmp_path)["train/loss"]][3:] == [-1.0] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_number_that_single_precision_lacks_does_not_stop_the_run(tmp_path, value):
    write_all(TensorBoard(tmp_path), [replace(STEP, loss=value), replace(STEP, step=1 << 40)])
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == [1, 1 << 40]


@given(st.binary(max_size=300))
def test_the_frame_is_the_one_of_the_reference(data):
    framed = record(data)
    length, body = framed[:8], framed[12:-4]
    assert int.from_bytes(length, "little") == len(data)
    assert body == data
    assert int.from_bytes(framed[8:12], "little") == masked_crc32c(length)
    assert int.from_bytes(framed[-4:], "little") == masked_crc32c(data)


def test_observing_imports_nothing_but_the_standard_library():
    script = (
        "import sys; before = set(sys.modules);"
        "import superstep.observe.jsonl, superstep.observe.tensorboard;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names - {'superstep'}))"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


# ── several sinks ──


class Notebook:
    def __init__(self, log, name, broken=False):
        self.log, self.name, self.broken = log, name, broken

    def write(self, event):
        self.log.append((self.name, event.name))

    def close(self):
        self.log.append((self.name, "close"))
        if self.broken:
            raise Fault(f"{self.name} is broken")


def test_every_sink_gets_every_event_and_is_closed_though_another_breaks():
    log = []
    sinks = Fanout([Notebook(log, "a"), Notebook(log, "b", broken=True), Notebook(log, "c")])
    sinks.write(STEP)
    sinks.write(RunFinished(step=1, elapsed_s=1.0, tokens_seen=1))
    with pytest.raises(Fault, match="b is broken"):
        sinks.close()
    assert log == [
        *[(name, event) for event in ("step", "finished") for name in "abc"],
        ("c", "close"),
        ("b", "close"),
        ("a", "close"),
    ]
