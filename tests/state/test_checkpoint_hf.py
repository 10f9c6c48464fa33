"""A checkpoint is a Hugging Face folder: what was trained loads elsewhere and says the same."""

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint import save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int

    def gather(self, value, form):
        return gather(value, form)


def _train_and_save(rank, world, plan, tied, qk_norm, folder):
    run = resolve(small.config(tied=tied, qk_norm=qk_norm, **plan), world)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    batch = small.batches(steps=1)[0]
    mine = rows(run.plan, mesh)
    parts = microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh)
    engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=1e-2)
    shapes = {}
    for part in gather({p.name: p.shape for p in engine.pieces(("weight",))}, dict[str, tuple[int, ...]]):
        shapes |= part
    place = checkpoint_at(Path(folder), 1)
    beside = {"config.json": json.dumps(to_hf_config(run.shape))}
    save(
        place,
        list(engine.pieces()),
        Position(step=1),
        Ranks(rank, world),
        tensors=dict.fromkeys(engine.state_kinds, shapes),
        beside=beside,
    )
    mesh.destroy()
    return str(place)


@pytest.mark.parametrize(
    ("plan", "tied", "qk_norm"),
    [({"dp": 2, "zero": 3}, True, False), ({"tp": 2}, False, True), ({"pp": 2, "chunks": 2}, True, True)],
    ids=str,
)
def test_transformers_reads_what_any_layout_wrote(pool, tmp_path, plan, tied, qk_norm):
    transformers = pytest.importorskip("transformers")
    place = pool.run(2, _train_and_save, plan, tied, qk_norm, str(tmp_path), timeout_s=60)[0]
    shape = resolve(small.config(tied=tied, qk_norm=qk_norm)).shape
    ours = Decoder(shape)
    load_weights(Path(place), global_tensors(ours, units(shape)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tokens = small.batches(steps=1)[0].tokens_BS
    with torch.no_grad():
        # Both are fp32 and differ in the order of sums alone.
        assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
