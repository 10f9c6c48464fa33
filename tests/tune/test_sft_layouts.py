"""A packed sequence costs what its conversations cost alone, on any layout: none of them sees another one."""

import contextlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tuned
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import stream_of
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.numerics.loss import IGNORE
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.load_weights import fill
from superstep.train.weights.model import tensor_shapes
from superstep.tune.config import read_recipe
from superstep.tune.initial_model import start_from
from superstep.tune.prepare_conversations import Conversations

LAYOUTS = ({"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2})


def alone(config: RunConfig, batch):
    """The loss of a batch, each conversation by itself, and the norm of its gradient."""
    shape = resolve(config).shape
    decoder = Decoder(shape)
    load_weights(Path(config.model.weights), global_tensors(decoder, units(shape)))
    total = torch.zeros(())
    for row, (tokens, targets) in enumerate(zip(batch.tokens_BS, batch.targets_BS, strict=True)):
        starts = torch.zeros_like(tokens) if batch.starts_BS is None else batch.starts_BS[row]
        for start in starts.unique().tolist():
            own = starts == start
            loss = torch.nn.functional.cross_entropy(
                decoder(tokens[own][None])[0], targets[own], ignore_index=IGNORE, reduction="sum"
            )
            total = total + loss
    total = total / batch.valid_tokens
    total.backward()
    squares = sum(float(param.grad.double().square().sum()) for param in set(decoder.parameters()))
    return float(total.detach()), squares**0.5


def stepped(rank, world, folder, configs):
    found = []
    for config, corpus in configs:
        with contextlib.chdir(folder):  # ranks of other tests may have another
            run = resolve(config)
        mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(minutes=1))
        engine = Engine(run, units(run.shape), mesh)
        fill(folder / config.model.weights, engine.pieces(("weight",)), tensor_shapes(engine), RankPeers(rank, world))
        engine.note_loaded(0)
        batch = stream_of(config, open_corpus(corpus), "train").batch(0, rows(run.plan, mesh))
        parts = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh, batch.starts_BS, batch.streams)
        result = engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=0.0)
        found.append((result.loss, result.grad_norm))
        mesh.destroy()
    return found


@pytest.mark.multiproc
def test_a_packed_sequence_costs_what_its_conversations_cost_alone(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tuned.make_files(tmp_path))
    configs, expected = [], []
    for packed in ("true", "false"):
        text = tuned.RECIPE.replace("[data]", f"[data]\npacked = {packed}")
        Path("recipe.toml").write_text(text, encoding="utf-8")
        recipe = read_recipe(Path("recipe.toml"))
        run = start_from(recipe)
        corpus = Conversations(run, recipe.sft, resolve(run).shape.vocab).prepare(tmp_path / packed)
        batch = stream_of(run, corpus, "train").batch(0, slice(0, 4))
        if packed == "true":
            assert any(len(starts.unique()) > 2 for starts in batch.starts_BS), "several share a sequence"
        wanted = alone(run, batch)
        for plan in LAYOUTS:
            configs.append((replace(run, plan=PlanConfig(microbatch=2, **plan)), corpus.folder))
            expected.append(wanted)
    for found in pool.run(2, stepped, Path.cwd(), configs, timeout_s=120):
        for (loss, norm), (wanted, wanted_norm), (config, _) in zip(found, expected, configs, strict=True):
            assert loss == pytest.approx(wanted, rel=2e-6), config.plan
            assert norm == pytest.approx(wanted_norm, rel=2e-5), config.plan
