"""Families with blocks unlike Llama's are served with the logits of training, or by torch where no kernel has them."""

from dataclasses import replace

import pytest
import torch

from superstep.comm.device import Device
from superstep.errors import ConfigError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.unit import global_tensors
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.shape import Latent, dropless
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.model.style import GEMMA, GPT_OSS, OLMO, QWEN_NEXT, BlockStyle
from superstep.plan.resolution.resolve import resolve
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.kernels.build import build
from superstep.serve.config import ServeConfig
from superstep.serve.load_rank import load_rank
from superstep.train.proof.sampler import can_serve

TINY = replace(SHAPES["tiny"], tied=False)
SLIDING = replace(TINY, window=24, full_layers=(1,))
FAMILIES = {
    "olmo2": replace(TINY, qk_norm=True, style=OLMO),
    "olmo3": replace(SLIDING, qk_norm=True, style=replace(OLMO, local_theta=500.0)),
    "gemma2": replace(SLIDING, style=replace(GEMMA, soft_cap=2.0, logit_cap=3.0)),
    "gemma3": replace(SLIDING, qk_norm=True, style=replace(GEMMA, local_theta=500.0, query_scale=0.2)),
    "granite": replace(
        TINY, style=BlockStyle(embedding_scale=2.0, query_scale=0.4, residual_scale=0.3, logit_divisor=3.0)
    ),
    "gpt_oss": replace(SLIDING, qkv_bias=True, moe=dropless(4, 2), style=replace(GPT_OSS, gate_limit=1.5)),
    "qwen3, mixed": replace(SLIDING, qk_norm=True),
}
FAMILY = pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
TOKENS = [(37 * n + 11 * (n // 7)) % TINY.vocab for n in range(300)]
CUTS = [1, 2, 19, 64, 255, 256, 300]


@pytest.fixture(autouse=True)
def _two_threads():
    """Exact mode sets torch to one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def made(shape, folder):
    """A decoder of random weights, large enough that every part moves the logits, and its folder."""
    torch.manual_seed(0)
    decoder = Decoder(shape)
    offset = shape.style.norm_offset
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5 - offset, 1.5 - offset)
    save_weights(folder, global_tensors(decoder, units(shape)), shape)
    return decoder


def opened(folder, **serve):
    return load_rank(folder, ServeConfig(pages=80, **serve), 0, None, Device("cpu")).forward


def logits(forward, cuts, page=0):
    """Of all tokens, computed in pieces that end at the cuts."""
    found, pages = [], tuple(range(page, page + 20))
    for begin, end in zip((0, *cuts), cuts, strict=False):
        part = RequestRows(first=begin, count=end - begin, pages=pages[: -(-end // 16)])
        found.append(forward(Rows(tokens=tuple(TOKENS[begin:end]), parts=(part,), wanted=tuple(range(end - begin)))))
    return torch.cat(found)


@FAMILY
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_logits_are_those_of_the_decoder(shape, exact, tmp_path):
    decoder = made(shape, tmp_path)
    with torch.no_grad():
        expected = decoder(torch.tensor([TOKENS]))[0]
    forward = opened(tmp_path, compute="fp32", exact=exact)
    whole, pieces = logits(forward, [300]), logits(forward, CUTS, page=30)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    if exact:
        assert torch.equal(pieces, whole)
    else:
        torch.testing.assert_close(pieces, expected, rtol=0, atol=1e-4)


@FAMILY
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_compiled_kernels_compute_a_family_rightly_or_leave_it_to_torch(shape, exact, tmp_path, compiled):
    if build(compiled).library is None:
        pytest.skip("there is no compiled decoder here")
    decoder = made(shape, tmp_path)
    forward = opened(tmp_path, compute="bf16", exact=exact, kernels=compiled)
    assert not isinstance(forward, CompiledDecoder)
    with torch.no_grad():
        expected = decoder(torch.tensor([TOKENS]))[0]
    found = logits(forward, CUTS).float()
    # Logits of about 1 (of Gemma 2, up to 3) by a model in bf16, whose numbers have 8 bits.
    assert (found - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


DELTA = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=16)
REFUSED = {
    "linear attention": replace(TINY, qk_norm=True, full_layers=(1,), style=QWEN_NEXT, delta=DELTA),
    "latent attention": replace(
        TINY,
        kv_heads=TINY.heads,
        dense_layers=1,
        dense_ffn=96,
        moe=replace(dropless(4, 2), router="sigmoid"),
        latent=Latent(query_rank=24, key_rank=40, rotated=8),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_attention_that_no_page_holds_is_refused_by_name(what, tmp_path):
    made(REFUSED[what], tmp_path)
    with pytest.raises(ConfigError, match=rf"config.json' has {what}, and a server.* keys and values"):
        opened(tmp_path, compute="fp32")


@pytest.mark.parametrize("shape", [*FAMILIES.values(), *REFUSED.values()], ids=[*FAMILIES, *REFUSED])
def test_a_proof_asks_only_a_server_that_takes_the_model(shape, tmp_path):
    made(shape, tmp_path)
    run = resolve(RunConfig(model=ModelConfig(name=str(tmp_path / "config.json")), plan=PlanConfig(dp=1)))
    assert can_serve(run) == (shape.moe is None and shape not in REFUSED.values())
