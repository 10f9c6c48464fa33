"""Beside peft: with the same base and the same factors, the same loss, gradients and update."""

from dataclasses import replace
from datetime import timedelta

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import low_rank
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.model.files.peft_adapter import write_adapter
from superstep.model.unit import initial
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.config import DataConfig, LoraConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.load_weights import fill
from superstep.train.weights.lora_base import begin_base
from superstep.train.weights.model import units_of

LR = 1e-3
ALONE = RankPeers(0, 1)


def run_of(folder, lora):
    train = TrainConfig(batch_sequences=4, lr=LR, weight_decay=0.1, clip_norm=1e9)
    return resolve(
        RunConfig(
            model=ModelConfig(name=str(folder / "config.json")),
            data=DataConfig(sequence_tokens=24),
            train=train,
            plan=PlanConfig(dp=1, microbatch=2),
            lora=lora,
        )
    )


@pytest.mark.parametrize(
    "model", [{}, {"qkv_bias": True, "tied": True}, {"qk_norm": True}], ids=["llama", "qwen2", "qwen3"]
)
def test_the_same_loss_gradients_and_update(tmp_path, model):
    base, adapter = low_rank.write_model(tmp_path / "base", **model), tmp_path / "adapter"
    made = low_rank.random_adapter(5, rank=4, alpha=6.0)
    write_adapter(adapter, made)
    tokens = torch.randint(low_rank.VOCAB, (4, 25), generator=torch.Generator().manual_seed(1))

    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True
    )
    named = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(named.values(), lr=LR, **settings)
    logits = theirs(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: param.grad.clone() for name, param in named.items()}
    optimizer.step()

    run = run_of(base, LoraConfig(rank=4, alpha=6.0))
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units_of(run), mesh)
    frozen = {piece.name: piece.values for piece in engine.frozen_pieces()}
    begin_base(run, engine, ALONE, base)
    before = {name: values.clone() for name, values in frozen.items()}
    fill(adapter / "adapter_model.safetensors", engine.pieces(("weight",)), shapes_of(engine), ALONE)
    engine.note_loaded(0)
    ours = {}

    def keep():
        ours.update({p.name: p.values.clone().view(p.shape) for p in engine.pieces(("gradient",))})

    batch = Batch({"tokens": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous(), 4 * 24, None)
    result = engine.train_step(microbatches_of(batch, run.plan, mesh), valid_tokens=4 * 24, lr=LR, inspect=keep)

    allowed = TOLERANCE["fp32"]
    assert result.loss == pytest.approx(float(loss.detach()), rel=5 * allowed.loss)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (ours[name] - gradient).norm() < allowed.gradient * gradient.norm(), name
    updated = {p.name: p.values.view(p.shape) for p in engine.pieces(("weight",))}
    for name, param in named.items():
        moved = param.detach() - start_of(made, name)
        assert (updated[name] - param.detach()).norm() < allowed.update * moved.norm(), name
    assert all(torch.equal(frozen[name], values) for name, values in before.items())


def start_of(adapter, name):
    linear, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
    return adapter.parts[linear].a if factor == "A" else adapter.parts[linear].b


def shapes_of(engine):
    return {piece.name: piece.shape for piece in engine.pieces(("weight",))}


def test_first_values_are_those_of_peft(tmp_path):
    run = run_of(low_rank.write_model(tmp_path), LoraConfig(rank=8))
    specs = {spec.name: spec for unit in units_of(run) for spec in unit.params.values() if spec.factor}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    named = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert specs.keys() == named.keys()
    for name, param in named.items():
        ours = initial(specs[name], param.shape, run.config.train.seed)
        if specs[name].factor == "b":
            assert not ours.any()
            assert not param.any()
        else:  # uniform within the same bound
            bound = param.shape[1] ** -0.5
            assert 0.9 * bound < float(ours.abs().max()) <= bound
            assert 0.9 * bound < float(param.abs().max()) <= bound
            assert float(ours.std()) == pytest.approx(float(param.detach().std()), rel=0.25)
    other = replace(run.config, train=replace(run.config.train, seed=1))
    name = next(name for name, spec in specs.items() if spec.factor == "a")
    drawn = [initial(specs[name], named[name].shape, config.train.seed) for config in (run.config, other)]
    assert not torch.equal(*drawn)
