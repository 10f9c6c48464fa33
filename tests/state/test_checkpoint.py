"""Checkpoints: whatever layout wrote it, any layout reads it; what is visible is whole."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from superstep.errors import Fault, StateError
from superstep.state.checkpoint import Position, checkpoint_at, checkpoints, load, prune, save
from superstep.state.piece import STATE, Piece, spans


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    size: int = 1

    def gather(self, value):
        return [value]


SHAPES = {"a.weight": (6, 4), "b.weight": (5,)}


def pieces(fill, *, cuts=1):
    """The state cut into ``cuts`` column blocks, each cut again in two runs of elements."""
    found = []
    for kind in STATE:
        for name, shape in SHAPES.items():
            columns = cuts if len(shape) == 2 else 1
            for block in range(columns):
                width = shape[-1] // columns
                index = (*(slice(0, n) for n in shape[:-1]), slice(block * width, (block + 1) * width))
                size = int(np.prod([s.stop - s.start for s in index]))
                whole = fill(kind, name)[index].reshape(-1)
                for low, high in ((0, size // 3), (size // 3, size)):
                    values = whole[low:high].clone()
                    found.append(
                        Piece(kind=kind, name=name, shape=shape, index=index, low=low, values=values, is_owner=True)
                    )
    return found


def truth(kind, name):
    generator = torch.Generator().manual_seed(hash((STATE.index(kind), len(name))) % 1000)
    return torch.randn(SHAPES[name], generator=generator)


def zeros(kind, name):
    return torch.zeros(SHAPES[name])


def write(root, step=7, *, cuts=2):
    root.mkdir(exist_ok=True)
    place = checkpoint_at(root, step)
    save(
        place,
        pieces(truth, cuts=cuts),
        Position(step=step, samples=28, tokens=99),
        Alone(),
        tensors=dict.fromkeys(STATE, SHAPES),
        beside={"config.json": "{}"},
    )
    return place


@given(st.data())
def test_spans_are_the_run_of_elements(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    base = np.arange(np.prod([n + 1 for n in shape])).reshape([n + 1 for n in shape])
    block = base[tuple(slice(1, n + 1) for n in shape)]
    low = data.draw(st.integers(0, block.size))
    high = data.draw(st.integers(low, block.size))
    out = np.full(high - low, -1)
    for part, at in spans(block, low, high):
        assert np.shares_memory(part, base)
        out[at : at + part.size] = part.reshape(-1)
    assert out.tolist() == block.reshape(-1)[low:high].tolist()


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_what_one_layout_wrote_another_reads(tmp_path, cuts):
    place = write(tmp_path / "c", cuts=2)
    target = pieces(zeros, cuts=cuts)
    assert load(place, target, Alone()) == Position(step=7, samples=28, tokens=99)
    for got, wanted in zip(target, pieces(truth, cuts=cuts), strict=True):
        assert torch.equal(got.values, wanted.values), (got.kind, got.name)


def test_other_tools_read_the_weights(tmp_path):
    place = write(tmp_path / "c")
    tensors = load_file(place / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == SHAPES
    assert torch.equal(tensors["a.weight"], truth("weight", "a.weight"))


def test_one_flipped_bit_is_found_and_named(tmp_path):
    place = write(tmp_path / "c")
    manifest = json.loads((place / "manifest.json").read_text())
    at = manifest["tensors"]["exp_avg.a.weight"]["offset"] + 5
    data = bytearray((place / "optimizer.safetensors").read_bytes())
    data[at] ^= 1
    (place / "optimizer.safetensors").write_bytes(data)
    target = pieces(zeros)
    with pytest.raises(StateError, match=r"exp_avg\.a\.weight.*other bits"):
        load(place, target, Alone())
    assert all(not piece.values.any() for piece in target), "a damaged checkpoint must not be half loaded"


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    place = write(tmp_path / "c")
    other = [
        Piece(
            kind="weight",
            name="a.weight",
            shape=(6, 5),
            index=(slice(0, 6), slice(0, 5)),
            low=0,
            values=torch.zeros(30),
            is_owner=True,
        )
    ]
    with pytest.raises(StateError, match=r"a\.weight \[6, 5\].*\[6, 4\]"):
        load(place, other, Alone())


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    root = tmp_path / "c"
    write(root, 7)
    (write(root, 9) / "manifest.json").unlink()
    assert [p.name for p in checkpoints(root)] == ["step-000007"]
    with pytest.raises(StateError, match=r"no checkpoint"):
        load(root / "step-000009", pieces(zeros), Alone())


def test_prune_keeps_the_newest_and_clears_leftovers(tmp_path):
    root = tmp_path / "c"
    for step in (1, 2, 3, 10):
        write(root, step)
    (root / "step-000011.partial").mkdir()
    prune(root, 2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000003", "step-000010"]


FULL = """
import resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_checkpoint as t
from superstep.errors import Fault
root = Path({root!r})
t.write(root, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    t.write(root, 2)
except Fault as fault:
    print("FAULT", fault)
"""


def test_a_disk_without_room_is_a_fault_and_leaves_what_was_there(tmp_path):
    root = tmp_path / "c"
    code = FULL.format(tests=os.path.dirname(__file__), root=str(root))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "FAULT" in done.stdout, done.stderr
    assert "cannot be written" in done.stdout
    assert [p.name for p in root.iterdir()] == ["step-000001"], "nothing half-written may stay"
    assert load(root / "step-000001", pieces(zeros), Alone()).step == 1


def test_a_fault_on_one_rank_stops_all(tmp_path):
    class Troubled(Alone):
        def gather(self, value):
            return [value, (None, "disk: gone")]

    with pytest.raises(Fault, match=r"rank 1: the checkpoint cannot be written: disk: gone"):
        save(
            checkpoint_at(tmp_path, 1),
            pieces(truth),
            Position(),
            Troubled(),
            tensors=dict.fromkeys(STATE, SHAPES),
            beside={},
        )
    assert not list(tmp_path.iterdir())
