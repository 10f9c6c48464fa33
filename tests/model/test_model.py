"""The decoder on one device, its units, and the table beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longer import longer
from superstep.model.axes import units
from superstep.model.decoder import Attention, Block, Decoder, flash
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.model.unit import global_tensors, initial
from superstep.plan.model.rope import Llama3Rope
from superstep.plan.model.sizes.named_sizes import SHAPES

TINY = SHAPES["tiny"]
QWEN = replace(TINY, family="qwen3", qk_norm=True, tied=False, head_dim=32)
LONG = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=64)
SHAPE = pytest.mark.parametrize("shape", [TINY, QWEN], ids=["llama", "qwen3"])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def seeded(shape, dtype=torch.float32):
    """A decoder with the first values of seed 0."""
    decoder = Decoder(shape)
    specs = {spec.name: spec for unit in units(shape) for spec in unit.params.values()}
    with torch.no_grad():
        for name, tensor in global_tensors(decoder, units(shape)).items():
            tensor.copy_(initial(specs[name], tensor.shape, 0))
    return decoder.to(dtype)


@SHAPE
def test_the_table_names_every_parameter_of_every_unit_and_each_of_its_dims(shape):
    assert [unit.name for unit in units(shape)] == ["embed", "block.0", "block.1", "head"]
    for unit in units(shape):
        with torch.device("meta"):
            module = unit.build()
        assert {name: p.dim() for name, p in module.named_parameters()} == {
            local: len(spec.axes) for local, spec in unit.params.items()
        }


def test_two_units_name_the_same_tensor_only_where_the_head_is_tied():
    def shared(shape):
        names = Counter(spec.name for unit in units(shape) for spec in unit.params.values())
        return [name for name, times in names.items() if times > 1]

    assert shared(TINY) == ["model.embed_tokens.weight"]
    assert shared(replace(TINY, tied=False)) == []


@SHAPE
def test_the_units_in_a_row_are_the_decoder(shape):
    decoder = seeded(shape)
    state = torch.randint(shape.vocab, (2, 16))
    expected = decoder(state)
    for unit in units(shape):
        module = unit.build()
        with torch.no_grad():
            for local, parameter in module.named_parameters():
                parameter.copy_(initial(unit.params[local], parameter.shape, 0))
        state = module(state)
    assert torch.equal(state, expected)


def test_first_values_follow_from_seed_and_name_alone():
    spec = units(TINY)[0].params["embed_tokens.weight"]
    values = initial(spec, (512, 64), 3)
    torch.manual_seed(5)
    assert torch.equal(values, initial(spec, (512, 64), 3))
    assert not torch.equal(values, initial(spec, (512, 64), 4))
    assert not torch.equal(values, initial(replace(spec, name="another"), (512, 64), 3))
    # 32768 draws: their mean and standard deviation stray by about 0.02 / sqrt(32768) = 1.1e-4.
    assert abs(values.mean()) < 5e-4
    assert abs(values.std() - 0.02) < 5e-4


def test_norms_start_as_ones_and_what_feeds_the_residual_stream_starts_smaller():
    params = units(TINY)[1].params
    assert initial(params["input_layernorm.weight"], (64,), 0).equal(torch.ones(64))
    assert params["mlp.down_proj.weight"].std == pytest.approx(0.02 / 2)  # sqrt(2 · 2 layers) = 2
    assert params["mlp.up_proj.weight"].std == 0.02


@SHAPE
def test_a_token_changes_no_logits_before_it(shape):
    decoder = seeded(shape)
    tokens = torch.randint(shape.vocab, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % shape.vocab
    before, after = decoder(tokens), decoder(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@SHAPE
def test_attention_is_an_argument(shape):
    def textbook(q_BSNH, k_BSKH, v_BSKH, rule):
        S, group = q_BSNH.shape[1], q_BSNH.shape[2] // k_BSKH.shape[2]
        k_BSNH, v_BSNH = (x.repeat_interleave(group, dim=2) for x in (k_BSKH, v_BSKH))
        scores = torch.einsum("bsnh,btnh->bnst", q_BSNH, k_BSNH) / q_BSNH.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
        return torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v_BSNH)

    decoder = seeded(shape)
    tokens = torch.randint(shape.vocab, (2, 16))
    # The two differ in the order of fp32 sums over 16 positions: a few units of 6e-8 of logits of about 1.
    torch.testing.assert_close(decoder(tokens), decoder(tokens, attend=textbook), rtol=0, atol=2e-6)


@SHAPE
def test_heads_cut_from_outside_add_up_to_the_whole(shape):
    """Tensor parallelism in small: each half keeps half of the heads' rows, and the halves' outputs sum."""
    whole = Attention(shape, Rope(shape)).double()
    x_BSD = torch.randn(2, 8, shape.width, dtype=torch.float64)

    def half(place):
        part = Attention(shape, Rope(shape)).double()
        part.q_norm, part.k_norm = whole.q_norm, whole.k_norm
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            cut = getattr(whole, name).weight.detach().chunk(2, dim)[place]
            getattr(part, name).weight = torch.nn.Parameter(cut)
        return part(x_BSD)

    # Float64, but rope's tables and the norms' insides are fp32: both sides round alike, the sum in fp64.
    torch.testing.assert_close(half(0) + half(1), whole(x_BSD), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", [None, LONG], ids=["plain", "llama3"])
def test_rope_turns_by_distance_alone(scaling):
    rope = Rope(replace(TINY, rope_scaling=scaling))
    q, k = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 64, 1, 16)
    scores_ST = torch.einsum("bsnh,btnh->st", rope(q), rope(k))
    # Equal along each diagonal, up to fp32 angles: 6e-8 of an angle of up to 64.
    torch.testing.assert_close(scores_ST[1:, 1:], scores_ST[:-1, :-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(rope(q).norm(dim=-1), q.norm(dim=-1))


def test_positions_are_counted_from_nought_and_may_be_given():
    rope, x_BSNH = Rope(TINY), torch.randn(2, 8, 4, 16)
    counted = rope(x_BSNH)
    assert torch.equal(rope(x_BSNH, torch.arange(8)), counted)
    assert torch.equal(rope(x_BSNH, torch.arange(8).expand(2, 8)), counted)
    assert torch.equal(rope(x_BSNH[:, 4:], torch.arange(4, 8)), counted[:, 4:])


def test_blocks_share_one_table_a_length():
    decoder, made = Decoder(TINY), []
    rope = decoder.block[0].self_attn.rope
    tables = rope.tables
    rope.tables = lambda positions, dtype: made.append(len(positions)) or tables(positions, dtype)
    for tokens in (8, 8, 16):
        decoder(torch.zeros(1, tokens, dtype=torch.long))
    assert made == [8, 16]
    for positions in (torch.arange(8), torch.arange(8, 16)):
        decoder(torch.zeros(1, 8, dtype=torch.long), positions=positions)
    assert made == [8, 16, 8, 8]


def test_training_may_follow_inference():
    decoder, tokens = Decoder(TINY), torch.zeros(1, 8, dtype=torch.long)
    with torch.inference_mode():
        decoder(tokens)
    decoder(tokens).sum().backward()


def test_a_decoder_on_the_meta_device_gives_shapes():
    with torch.device("meta"):
        decoder = Decoder(SHAPES["llama3.1-8b"])
        logits = decoder(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, 128256)


# fp32: the sums of 64 squares and 96 rows stray by a few 6e-8. bf16: statistics are fp32, so that only the
# result is rounded, by at most 2^-9 = 2e-3 of itself. Rounding on the way, as in bf16 statistics, gives more.
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-3)], ids=["fp32", "bf16"])
def test_rms_norm_and_its_gradients_are_the_textbooks(dtype, rtol):
    norm = RMSNorm(64, 1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x, grad = (torch.randn(3, 32, 64).to(dtype).requires_grad_() for _ in range(2))
    y = norm(x)
    y.backward(grad)

    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    y64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight64
    y64.backward(grad.double())

    assert y.dtype == x.grad.dtype == norm.weight.grad.dtype == dtype
    for ours, exact in ((y, y64), (x.grad, x64.grad), (norm.weight.grad, weight64.grad)):
        assert (ours.double() - exact).norm() < rtol * exact.norm()


@SHAPE
def test_bf16_stays_bf16_and_near_fp32(shape):
    tokens = torch.randint(shape.vocab, (2, 32))
    narrow, wide = seeded(shape, torch.bfloat16)(tokens), seeded(shape)(tokens)
    assert narrow.dtype == torch.bfloat16
    # About ten roundings of 2^-9 on the way, which add up like a random walk.
    assert (narrow.float() - wide).norm() < 10**0.5 * 2**-8 * wide.norm()


@pytest.mark.parametrize("backend", longer(["eager", "aot_eager"], lambda backend: backend == "aot_eager"))
def test_a_block_compiles_without_a_break_and_computes_the_same(backend):
    block = Block(QWEN, Rope(QWEN))
    h_BSD = torch.randn(2, 8, QWEN.width)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    # Torch's own norm stands in for the eager one: other order of sums, so a few units of 6e-8.
    torch.testing.assert_close(compiled(h_BSD), block(h_BSD), rtol=1e-5, atol=1e-5)


def test_flash_keeps_the_layout():
    q, kv = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    assert flash(q, kv, kv).shape == (2, 8, 4, 16)
    assert flash(q, kv, kv).is_contiguous()
    first = F.scaled_dot_product_attention(q[:, :1, :1], kv[:, :1, :1], kv[:, :1, :1])
    torch.testing.assert_close(flash(q, kv, kv)[:, :1, :1], first)
