"""Checkpoints: whatever layout wrote it, any layout reads it, and so do other tools."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import saved
from superstep.errors import StateError
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece, runs


@given(st.data())
def test_runs_are_the_elements_of_a_block(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    index = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    block = whole[tuple(index)].reshape(-1)
    low = data.draw(st.integers(0, block.size))
    high = data.draw(st.integers(low, block.size))
    found = list(runs(shape, tuple(index), low, high - low))
    out = np.full(high - low, -1)
    for run in found:
        out[run.at : run.at + run.count] = whole.reshape(-1)[run.offset : run.offset + run.count]
    assert out.tolist() == block[low:high].tolist()
    gaps = np.diff(block[low:high]) != 1
    is_block_of_rows = all(s == slice(0, n) for s, n in zip(index[1:], shape[1:], strict=True))
    assert len(found) == (1 if high > low else 0) + gaps.sum() or not is_block_of_rows
    assert [run.offset for run in found] == sorted(run.offset for run in found)


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_what_one_layout_wrote_another_reads(tmp_path, cuts):
    place = saved.write(tmp_path / "c", cuts=2)
    target = saved.pieces(saved.zeros, cuts=cuts, runs=3)
    assert load(place, target, saved.Alone()) == Position(step=7, samples=28, tokens=99)
    for got, wanted in zip(target, saved.pieces(saved.truth, cuts=cuts, runs=3), strict=True):
        assert torch.equal(got.values, wanted.values), (got.kind, got.name)


def test_other_tools_read_the_weights(tmp_path):
    place = saved.write(tmp_path / "c")
    tensors = load_file(place / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == saved.SHAPES
    for name, shape in saved.SHAPES.items():
        assert torch.equal(tensors[name], saved.truth("weight", name, shape))
    moments = load_file(place / "optimizer.safetensors")
    assert moments.keys() == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in saved.SHAPES}


def test_a_tensor_of_no_elements_is_kept(tmp_path):
    shapes = {"none": (0, 3), "one": (1,)}
    place = checkpoint_at(tmp_path, 1)
    mine = saved.pieces(saved.truth, shapes=shapes, runs=1)
    save(place, mine, Position(step=1), saved.Alone(), tensors=dict.fromkeys(saved.STATE, shapes), beside={})
    assert load_file(place / "model.safetensors")["none"].shape == (0, 3)
    assert load(place, saved.pieces(saved.zeros, shapes=shapes, runs=1), saved.Alone()).step == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    place = saved.write(tmp_path / "c")
    index = (slice(0, 6), slice(0, 5))
    other = TensorPiece(
        kind="weight", name="a.weight", shape=(6, 5), index=index, low=0, values=torch.zeros(30), is_owner=True
    )
    with pytest.raises(StateError, match=r"a\.weight \[6, 5\].*\[6, 4\]"):
        load(place, [other], saved.Alone())


FULL = """
import resource, sys
sys.path.insert(0, {support!r})
from pathlib import Path
import saved
from superstep.errors import Fault
root = Path({root!r})
saved.write(root, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    saved.write(root, 2)
except Fault as fault:
    print("FAULT", fault)
"""


def test_a_disk_without_room_is_a_fault_and_leaves_what_was_there(tmp_path):
    root = tmp_path / "c"
    code = FULL.format(support=os.path.dirname(saved.__file__), root=str(root))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "FAULT" in done.stdout, done.stderr
    assert "cannot be written" in done.stdout
    assert "older ones are untouched" in done.stdout
    assert done.stdout.endswith("File too large; make room on its disk.\n")
    assert [p.name for p in root.iterdir()] == ["step-000001"], "nothing half-written may stay"
    assert load(root / "step-000001", saved.pieces(saved.zeros), saved.Alone()).step == 1
