"""Multi-token prediction: its module beside plain code, its targets, and both losses by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import runs
from superstep.cli.main import main
from superstep.data.batch import FURTHER_TARGETS, Batch, add_further_tokens
from superstep.engine.metrics.further_loss import FurtherLoss
from superstep.model.axes import units
from superstep.model.decoder import Head
from superstep.model.mtp import FurtherToken
from superstep.model.unit import INPUT, UnitGraph
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import LossTarget
from superstep.plan.config import ModelConfig
from superstep.plan.model.axes import NEXT_TOKENS
from superstep.plan.model.sizes.lookup import shape_of
from superstep.state.tensor_file import FILES

SHAPE = replace(shape_of(ModelConfig(name="tiny", vocab=64, mtp_weight=0.3)), layers=1)
NEAR = 2e-5
KINDS = {"head": Head, "mtp": FurtherToken}


def plain_attention(layer, x):
    """Rotary attention of all earlier tokens, from the layer's parameters."""
    B, S, _ = x.shape
    q, k, v = (m(x).view(B, S, -1, SHAPE.head_dim).transpose(1, 2) for m in (layer.q_proj, layer.k_proj, layer.v_proj))
    half = SHAPE.head_dim // 2
    angle = torch.arange(S)[:, None].double() / SHAPE.rope_theta ** (torch.arange(half).double() / half)
    cos, sin = angle.cos().float().to(x.dtype), angle.sin().float().to(x.dtype)
    q, k = (
        torch.cat((y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin), -1)
        for y in (q, k)
    )
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / SHAPE.head_dim**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))


def plain_norm(layer, x):
    return x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight


def plain_block(block, h):
    h = h + plain_attention(block.self_attn, plain_norm(block.input_layernorm, h))
    x = plain_norm(block.post_attention_layernorm, h)
    return h + block.mlp.down_proj(F.silu(block.mlp.gate_proj(x)) * block.mlp.up_proj(x))


def test_both_losses_and_all_gradients_are_those_of_plain_code():
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch = add_further_tokens(Batch({"tokens": inputs}, targets, targets.numel()))
    ours, theirs = UnitGraph(units(SHAPE), 0), UnitGraph(units(SHAPE), 0).double()
    found, expected = (dict(model.named_modules()) for model in (ours, theirs))

    logits = ours({INPUT: inputs, **batch.fields})
    further = FurtherLoss(0.3)
    aim = further.aim(LossTarget(targets), _Fields(batch.fields), is_trained=True)
    logp = -F.cross_entropy(logits.flatten(0, 1), aim.targets.flatten().clamp(min=0), reduction="none")
    aim.terms(logp.detach())
    weights = aim.streams["weights"].flatten()
    loss = -(logp * weights).where(aim.targets.flatten() != IGNORE, 0.0).sum()

    part = {name: next(m for m in expected.values() if type(m) is kind) for name, kind in KINDS.items()}
    table = part["mtp"].embed.embed_tokens.weight
    block = next(m for m in expected.values() if type(m).__name__ == "Block")
    h = plain_block(block, table[inputs])
    main_nats = F.cross_entropy(
        (plain_norm(part["head"].norm, h) @ table.t()).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    mtp = part["mtp"]
    both = (plain_norm(mtp.pre_fc_norm_embedding, table[targets]), plain_norm(mtp.pre_fc_norm_hidden, h))
    x = plain_norm(mtp.norm, plain_block(mtp.layers[0], torch.cat(both, -1) @ mtp.fc.weight.t()))
    second = (x @ table.t())[:, :-1].flatten(0, 1)
    mtp_nats = F.cross_entropy(second, targets[:, 1:].flatten(), reduction="sum")

    sums = further.sums.tolist()
    assert sums == pytest.approx([float(main_nats), float(mtp_nats), 2 * 22], rel=1e-6)
    gradients = [
        torch.autograd.grad(value, list(model.parameters()))
        for value, model in ((loss, ours), (main_nats + 0.3 * mtp_nats, theirs))
    ]
    assert found.keys() == expected.keys()
    for mine, wanted in zip(*gradients, strict=True):
        assert (mine - wanted).norm() <= NEAR * wanted.norm()


class _Fields:
    """What the second loss reads of a microbatch."""

    def __init__(self, fields):
        self.fields = fields


def test_no_token_of_another_document_is_predicted():
    tokens, starts = torch.arange(1, 8)[None], torch.tensor([[0, 0, 0, 3, 3, 5, 5]])
    targets = torch.tensor([[2, 3, IGNORE, 5, IGNORE, 7, 8]])
    fields = add_further_tokens(Batch({"tokens": tokens}, targets, 5, starts)).fields
    assert fields[NEXT_TOKENS].tolist() == [[2, 3, 4, 5, 6, 7, 8]]
    assert fields[FURTHER_TARGETS].tolist() == [[3, IGNORE, IGNORE, IGNORE, IGNORE, 8, IGNORE]]


def test_without_documents_the_token_after_the_next_is_the_next_ones_target():
    tokens = torch.arange(1, 6)[None]
    fields = add_further_tokens(Batch({"tokens": tokens}, tokens + 1, 5)).fields
    assert fields[FURTHER_TARGETS].tolist() == [[3, 4, 5, 6, IGNORE]]


def test_a_run_reports_both_losses_and_its_checkpoint_is_a_plain_model(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml", "--model.mtp-weight", "0.3", "--train.lr", "0.01", "--train.steps", "20"]) == 0
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    further = [event["values"][0] for event in events if event["event"] == "measures"]
    assert len(losses) == len(further) == 20
    assert losses[-1] < losses[0] - 0.5
    assert further[-1] < further[0] - 0.2
    folder = tmp_path / "run/checkpoints/step-000020"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert (folder / FILES["weight"]).is_file()
    assert main(["checkpoint", "export", "run", "--out", "out"]) == 0


@pytest.mark.multiproc
def test_a_whole_table_of_a_split_stream_is_proven(tmp_path, monkeypatch, capsys):
    """The next tokens are looked up for the whole sequence, of which each tensor-parallel rank keeps its part."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    layout = ["--plan.tp", "2", "--plan.rules.vocab", "none", "--plan.sequence-parallel", "true"]
    assert main(["prove", "run.toml", "--model.mtp-weight", "0.3", *layout]) == 0, capsys.readouterr().out
