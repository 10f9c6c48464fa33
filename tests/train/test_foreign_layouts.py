"""What foreign models bring, biases and a sliding window, on every kind of layout: as one device computes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.rope import YarnRope
from superstep.plan.model.shape import Latent, dropless
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.model.style import GEMMA, GPT_OSS, OLMO, QWEN_NEXT, BlockStyle
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc

DELTA = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
GATED = replace(QWEN_NEXT, rotary_share=0.5)
YARN = YarnRope(
    factor=4.0, original_tokens=8, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=1.0, score_scale=1.0
)
OF = {
    "qwen2": {"qkv_bias": True},
    "mistral": {"window": 6},
    "qwen3": {"qk_norm": True, "window": 6, "full_layers": (1,)},
    "olmo2": {"qk_norm": True, "style": OLMO},
    "olmo3": {"qk_norm": True, "window": 6, "full_layers": (1,), "style": replace(OLMO, local_theta=500.0)},
    "gemma2": {"window": 6, "full_layers": (1,), "style": replace(GEMMA, soft_cap=2.0, logit_cap=3.0)},
    "gemma3_text": {
        "qk_norm": True,
        "tied": True,
        "window": 6,
        "full_layers": (1,),
        "style": replace(GEMMA, local_theta=500.0, query_scale=0.25),
    },
    "gpt_oss": {
        "qkv_bias": True,
        "window": 6,
        "full_layers": (1,),
        "moe": dropless(4, 2, 0.01),
        "style": replace(GPT_OSS, gate_limit=0.5),
    },
    "deepseek_v3": {
        "moe": replace(dropless(8, 2, shared_experts=1), router="sigmoid", groups=4, groups_per_token=2, scale=2.5),
        "dense_layers": 1,
        "dense_ffn": 48,
        "latent": Latent(query_rank=12, key_rank=20, rotated=8),
        "rope_scaling": YARN,
    },
    "granite": {
        "style": BlockStyle(embedding_scale=6.0, query_scale=0.4, residual_scale=0.3, logit_divisor=3.0),
    },
    "qwen3_5_text": {"qk_norm": True, "full_layers": (1,), "style": GATED, "delta": DELTA},
    "qwen3_next": {
        "qk_norm": True,
        "full_layers": (1,),
        "style": replace(GATED, shared_gate=True),
        "moe": dropless(4, 2, 0.01, shared_experts=2),
        "delta": replace(DELTA, is_grouped=True),
    },
}
OF["deepseek_v3, wide queries"] = OF["deepseek_v3"] | {"latent": Latent(query_rank=None, key_rank=20, rotated=8)}
LINEAR = ("qwen3_5_text", "qwen3_next")
OF["gpt_oss, full"] = OF["gpt_oss"] | {"window": None, "full_layers": ()}
FAMILIES = ("olmo2", "olmo3", "gemma2", "gemma3_text", "granite", "gpt_oss", "deepseek_v3")
EVERY = (
    {"dp": 2, "zero": 3, "recompute": "selective"},
    {"tp": 2, "recompute": "full"},
    {"tp": 2, "sequence_parallel": False},
    {"pp": 2, "schedule": "zb-h1"},
    {"cp": 2, "context": "ulysses"},
)
LAYOUTS = [
    ("qwen2", {"tp": 2}),
    ("qwen2", {"tp": 2, "sequence_parallel": False, "recompute": "full"}),
    ("qwen2", {"dp": 2, "zero": 3, "recompute": "selective"}),
    ("qwen2", {"pp": 2, "schedule": "zb-h1"}),
    ("qwen2", {"cp": 2}),
    ("mistral", {"dp": 2, "zero": 2, "recompute": "selective"}),
    ("mistral", {"tp": 2, "recompute": "full"}),
    ("mistral", {"cp": 2, "context": "ulysses"}),
    ("qwen3", {"pp": 2, "recompute": "selective"}),
    ("qwen3", {"cp": 2, "context": "ulysses"}),
    *((kind, plan) for kind in FAMILIES for plan in EVERY),
    *((kind, plan) for kind in LINEAR for plan in (*EVERY, {"cp": 2, "recompute": "full"})),
    ("gpt_oss", {"dp": 2, "ep": 2}),
    ("deepseek_v3", {"dp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2, "recompute": "selective"}),
    ("deepseek_v3", {"cp": 2}),
    ("deepseek_v3, wide queries", {"dp": 2, "zero": 3, "recompute": "selective"}),
    ("deepseek_v3, wide queries", {"tp": 2, "recompute": "full"}),
    ("deepseek_v3, wide queries", {"tp": 2, "sequence_parallel": False}),
    ("gpt_oss", {"tp": 2, "ep": 2, "recompute": "selective"}),
    ("gpt_oss", {"cp": 2}),
    ("gpt_oss, full", {"cp": 2}),
    ("gpt_oss, full", {"cp": 2, "context": "ulysses", "recompute": "selective"}),
]


def _config(kind, folder, **plan):
    """A small run on a config.json of this kind."""
    run = small.config(layers=3, qk_norm=False, tied=False, **plan)
    path = Path(folder) / f"{kind}.json"
    # A larger eps keeps the rounding of a head's small first outputs small, which the norm of linear attention divides.
    eps = {"norm_eps": 1e-3} if kind in LINEAR else {}
    path.write_text(json.dumps(to_hf_config(replace(shape_of(run.model), **OF[kind], **eps))))
    return replace(run, model=replace(type(run.model)(), name=str(path)))


def _prove_all(rank, world, cases):
    one = World(rank, world, Device("cpu"))
    return [prove(one, run, small.batches(), Path(folder), reruns=False) for run, folder in cases]


def test_every_kind_of_layout_computes_what_one_device_does(pool, tmp_path):
    for kind in OF:
        run = resolve(_config(kind, tmp_path))
        assert run.shape.qkv_bias == (kind == "qwen2" or kind.startswith("gpt_oss"))
        assert run.shape.window == OF[kind].get("window")
        (tmp_path / kind).mkdir()
        torch.set_num_threads(1)
        write_reference(run.shape, run.config.train, small.batches(), tmp_path / kind)
    cases = [(resolve(_config(kind, tmp_path, **plan)), str(tmp_path / kind)) for kind, plan in LAYOUTS]
    verdicts = pool.run(2, _prove_all, cases, timeout_s=300)[0]
    for case, verdict in zip(LAYOUTS, verdicts, strict=True):
        assert verdict.compared > 0
        assert verdict.is_proven, (case, verdict.first and verdict.first.describe())


EXACT = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"pp": 2},
    {"dp": 2},
]


def _exact(kind, folder, **plan):
    found = _config(kind, folder, **{"microbatch": 4, **plan})
    return resolve(replace(found, numerics=replace(found.numerics, exact=True, exact_chunks=4)))


def _write(rank, world, run, folder):
    return write_bits(World(rank, world, Device("cpu")), run, small.batches(), Path(folder), stop=1)


def _prove_exact(rank, world, runs, folder):
    left, verdicts = Path(folder) / "checkpoint", []
    for number, run in enumerate(runs):
        relay = Relay(take=left, leave=Path(folder) / f"left-{number}", step=1)
        verdicts.append(prove_exact(World(rank, world, Device("cpu")), run, small.batches(), Path(folder), relay))
        left = relay.leave
    return verdicts


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "deepseek_v3, wide queries", *FAMILIES, *LINEAR])
def test_a_foreign_model_has_the_same_bits_on_every_layout(kind, pool, tmp_path):
    folder = tmp_path / "bits"
    folder.mkdir()
    pool.run(1, _write, _exact(kind, tmp_path), str(folder), timeout_s=120)
    runs = [_exact(kind, tmp_path, **plan) for plan in EXACT]
    for plan, verdict in zip(EXACT, pool.run(2, _prove_exact, runs, str(folder), timeout_s=300)[0], strict=True):
        assert verdict.compared > 0
        assert verdict.is_proven, (plan, verdict)
