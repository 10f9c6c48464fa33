"""Linear attention on emulated GPUs: the CPU's losses and gradients, without races, on every kind of layout."""

import json
from dataclasses import replace

import pytest

import small
from strict_ranks import prove_on_gpus
from superstep.plan.config import ModelConfig
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.style import QWEN_NEXT
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

TOKENS = 32
LAYOUTS = {
    "selective bf16": {"compute": "bf16", "recompute": "selective"},
    "zero 3": {"dp": 2, "zero": 3, "recompute": "full"},
    "tp": {"tp": 2, "sequence_parallel": True, "zero": 1},
    "cp": {"cp": 2},
    "documents cp": {"cp": 2, "masked": True, "packed": True},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
}


def of_layout(name, folder):
    layout = {"microbatch": small.microbatch_for(LAYOUTS[name])} | LAYOUTS[name]
    run = small.config(layers=3, qk_norm=False, tied=False, **layout)
    run = replace(
        run,
        model=replace(run.model, heads=4, kv_heads=2, head_dim=16),
        data=replace(run.data, sequence_tokens=TOKENS),
    )
    shape = replace(
        shape_of(run.model),
        qk_norm=True,
        norm_eps=1e-3,
        full_layers=(1,),
        style=QWEN_NEXT,
        delta=DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    )
    path = folder / "config.json"
    path.write_text(json.dumps(to_hf_config(shape)))
    return resolve(replace(run, model=ModelConfig(name=str(path))))


def batches(run):
    masked = run.config.data.document_mask
    return small.batches(masked=masked, tokens=TOKENS)


def prove_here(rank, world, run, folder):
    return prove_on_gpus(rank, world, run, batches(run), folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_cpus_losses(pool, tmp_path, name):
    run = of_layout(name, tmp_path)
    write_reference(run.shape, run.config.train, batches(run), tmp_path)
    for rank, (first, observed) in enumerate(pool.run(run.plan.mesh.world, prove_here, run, tmp_path, timeout_s=90)):
        assert not first
        assert observed.races == {}
        assert observed.contexts == {rank}
