"""The decoder that is compiled here: fp64's numbers within bf16's rounding, and bits that no neighbour changes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels.compile_cpp import BuildResult
from superstep.model.decoder import Decoder, flash
from superstep.plan.model.attention_rule import AttentionRule
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder, can_compile
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.kernels.build import FLAGS, NAMES, SOURCES, build
from superstep.serve.compute.linears.fast_linears import make_fast
from superstep.serve.compute.linears.fused_linears import Linears
from superstep.serve.compute.linears.onednn_linear import pack_weight
from superstep.serve.compute.linears.panel_weights import LARGE, PanelLinear, in_large_pages, in_panels
from superstep.serve.compute.linears.quantize import format_named, tokens_to_8_bits
from superstep.serve.compute.sampler import read_rows, read_totals
from superstep.serve.compute.tiled_kv_cache import TiledAttention, TiledKvCache, can_tile

BF16, FP32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def built(compiled):
    built = build(compiled)
    if built.library is None:
        pytest.skip(built.why)
    return built


def numbers(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# Products.


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 600])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (70, 96), (192, 1000)])
def test_products_of_any_number_of_rows(built, rows, outputs, inputs):
    x, weight, bias = (
        t.bfloat16() for t in (numbers(rows, inputs), numbers(outputs, inputs, seed=1), numbers(outputs))
    )
    product = in_panels(built.library, pack_weight)(weight, bias)
    assert isinstance(product, PanelLinear)
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    out = product(x[None])[0]
    assert ((out.double() - exact).abs() <= (inputs + 1) * FP32 * size + BF16 * exact.abs()).all()
    for row in {0, rows // 2, rows - 1}:  # a row is computed as if it were alone
        assert torch.equal(product(x[row : row + 1])[0], out[row])


@pytest.mark.parametrize("rows", [1, 6, 13])
def test_products_of_8_bits_are_exact_but_for_one_rounding(built, rows):
    x, weight, bias = (t.bfloat16() for t in (numbers(rows, 132), numbers(70, 132, seed=1), numbers(70)))
    x[0] = 0
    row = format_named("w8a8")
    product = in_panels(built.library, row.pack, row)(weight, bias)
    assert isinstance(product, PanelLinear)
    codes, scale = tokens_to_8_bits(x)
    exact = F.linear((codes.double() - 128) * scale.double(), row.encode(weight).weight().double(), bias.double())
    assert ((product(x).double() - exact).abs() <= (BF16 + 4 * FP32) * (exact.abs() + bias.double().abs())).all()
    x[-1, 3] = torch.nan
    assert product(x)[-1].isnan().all()


def test_other_weights_are_laid_out_in_the_other_way(built):
    pack = in_panels(built.library, pack_weight)
    assert not isinstance(pack(numbers(8, 6).bfloat16(), None), PanelLinear)  # inputs that are no multiple of 4
    assert not isinstance(pack(numbers(8, 64), None), PanelLinear)
    assert make_fast([], BuildResult(None, "no compiler"), quantize="w8a8").product(torch.nn.Linear(1, 1)) is None


# Attention.


def paged(built, q, k, v, chunks, *, window=None, page_tokens=16, seed=0):
    """Attention of two texts at once, each in chunks, in pages of no order that held numbers that are none."""
    _, tokens, heads, width = k.shape
    pages = -(-tokens // page_tokens)
    store = TiledKvCache(layers=2, pages=2 * pages + 3, page_tokens=page_tokens, kv_heads=heads, head_dim=width)
    store.keys.fill_(torch.nan)
    store.values.fill_(torch.nan)
    order = torch.randperm(2 * pages + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = order[:pages], order[pages : 2 * pages]
    attention, out, at = TiledAttention(built.library, store), [[], []], 0
    for count in chunks:
        held = -(-(at + count) // page_tokens)
        parts = [RequestRows(first=at, count=count, pages=tuple(table[:held])) for table in tables]
        rows = slice(at, at + count)
        mixed = attention(parts)(1)(
            *(torch.cat((x[:1, rows], x[1:, rows]), 1) for x in (q, k, v)), AttentionRule(window=window)
        )
        for text, mine in zip(out, mixed[0].split(count), strict=True):
            text.append(mine)
        at += count
    return torch.stack([torch.cat(text) for text in out])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 16), (6, 2, 64), (16, 1, 80), (4, 2, 128)])
def test_attention_over_pages(built, heads, kv_heads, width, window):
    tokens = 150
    q = numbers(2, tokens, heads, width, seed=9).bfloat16() * 2
    k, v = (numbers(2, tokens, kv_heads, width, seed=seed).bfloat16() for seed in (1, 2))
    exact = flash(q.double(), k.double(), v.double(), AttentionRule(window=window))
    out = paged(built, q, k, v, [tokens], window=window)
    # Each is a mean of values, so that errors of the shares are of the values' own size.
    assert (out.double() - exact).abs().max() < 2 * BF16 * v.double().abs().max()
    for chunks in ([1, 1, 1, 13, 48, 1, 64, 21], [100, *[1] * 50], [63, 1, 64, 22]):
        assert torch.equal(paged(built, q, k, v, chunks, window=window, seed=len(chunks), page_tokens=32), out)


def test_what_attention_does_not_take():
    given = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_tokens": 16, "dtype": torch.bfloat16}
    assert can_tile(**given)
    for change in ({"head_dim": 24}, {"page_tokens": 8}, {"dtype": torch.float32}, {"heads": 34}, {"head_dim": 272}):
        assert not can_tile(**(given | change))


# The whole.

SIZES = {
    "llama": {},
    "groups of 3, untied": {"heads": 6, "kv_heads": 2, "tied": False, "head_dim": 32},
    "biases, a window": {"qkv_bias": True, "window": 24, "width": 80, "head_dim": 16},
    "normed heads": {"qk_norm": True, "ffn": 100},
}


def decoder(**changes):
    """A model whose attention and feed-forwards all matter."""
    torch.manual_seed(3)
    model = Decoder(replace(SHAPES["tiny"], vocab=130, **changes)).requires_grad_(False)
    for name, values in model.named_parameters():
        values.normal_(1.0 if "norm" in name else 0.0, 0.3 if values.dim() == 1 else 2.0 / values.shape[1] ** 0.5)
    return model.bfloat16()


def compile_(built, model, shape, quantize=None, linears=None):
    modules = [model.embed, *model.block, model.head]
    linears = linears or make_fast(modules, built, quantize=quantize)
    assert can_compile(shape, modules, linears)
    store = TiledKvCache(
        layers=shape.layers, pages=40, page_tokens=16, kv_heads=shape.kv_heads, head_dim=shape.head_dim
    )
    return CompiledDecoder(built.library, shape, modules, linears, store, None)


def rows_of(tokens, first, count, page=0):
    part = RequestRows(first=first, count=count, pages=tuple(range(page, page - (-(first + count) // 16))))
    return Rows(tokens=tuple(tokens[first : first + count]), parts=(part,), wanted=tuple(range(count)))


TOKENS = [(37 * n + 11) % 130 for n in range(90)]


@pytest.mark.parametrize("quantize", [None, "w8a8"])
@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_a_model_in_one_call(built, changes, quantize):
    model = decoder(**changes)
    shape = replace(SHAPES["tiny"], vocab=130, **changes)
    exact = decoder(**changes).double()(torch.tensor([TOKENS]))[0]
    torchs = model(torch.tensor([TOKENS])).double()[0]
    compute = compile_(built, model, shape, quantize)
    out = compute(rows_of(TOKENS, 0, 90))
    error = (out.double() - exact).norm() / exact.norm()
    usual = (torchs - exact).norm() / exact.norm()
    assert error < (1.25 * usual if quantize is None else 8 * usual)
    # Cut into steps, and beside another text: the same bits.
    at, pieces = 0, []
    for count in (1, 17, 40, 1, 1, 30):
        mine, other = rows_of(TOKENS, at, count, page=20), rows_of(TOKENS[::-1], at, count, page=10)
        both = Rows(
            tokens=other.tokens + mine.tokens,
            parts=other.parts + mine.parts,
            wanted=tuple(range(count, 2 * count)),
        )
        pieces.append(compute(both))
        at += count
    assert torch.equal(torch.cat(pieces), out)


@pytest.mark.parametrize("quantize", [None, "w8a8"])
@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_rows_that_nobody_asks_for_are_left_in_the_last_layer(built, changes, quantize):
    model, shape = decoder(**changes), replace(SHAPES["tiny"], vocab=130, **changes)
    compute = compile_(built, model, shape, quantize)
    alone = compute(rows_of(TOKENS, 0, 90)), compute(rows_of(TOKENS[::-1], 0, 90))
    one, other = rows_of(TOKENS, 0, 50), rows_of(TOKENS[::-1], 0, 50, page=10)
    both = Rows(tokens=one.tokens + other.tokens, parts=one.parts + other.parts, wanted=())
    for wanted in ((), (99,), (49, 50), (0, 3, 4, 5, 48, 49, 50, 51, 70, 99), tuple(range(100))):
        out = compute(replace(both, wanted=wanted))
        assert torch.equal(out, torch.cat((alone[0][:50], alone[1][:50]))[list(wanted)])
    compute(replace(both, wanted=()))
    # Their keys are there nevertheless.
    assert torch.equal(compute(rows_of(TOKENS, 50, 40)), alone[0][50:])
    assert torch.equal(compute(rows_of(TOKENS[::-1], 50, 40, page=10)), alone[1][50:])


def test_a_model_of_no_numbers_gives_none(built):
    model, shape = decoder(), replace(SHAPES["tiny"], vocab=130)
    model.block[1].mlp.up_proj.weight[3, 5] = torch.nan
    assert compile_(built, model, shape)(rows_of(TOKENS, 0, 3)).isnan().all()


def test_new_weights_count_once_they_are_laid_out(built):
    shape = replace(SHAPES["tiny"], vocab=130)
    model, other = decoder(), decoder()
    for values in other.parameters():
        values.mul_(1.25)
    modules = [model.embed, *model.block, model.head]
    linears = make_fast(modules, built, quantize=None)
    compute, fresh = compile_(built, model, shape, linears=linears), compile_(built, other, shape)
    old = compute(rows_of(TOKENS, 0, 40))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)
    linears.lay_out()
    assert torch.equal(compute(rows_of(TOKENS, 0, 40)), fresh(rows_of(TOKENS, 0, 40)))
    assert not torch.equal(compute(rows_of(TOKENS, 0, 40)), old)


def test_what_one_call_does_not_compute(built):
    model, shape = decoder(), replace(SHAPES["tiny"], vocab=130)
    modules = [model.embed, *model.block, model.head]
    assert not can_compile(shape, modules, Linears(modules, pack_weight))  # products of another layout
    assert not can_compile(
        replace(shape, moe=SHAPES["demo-moe"].moe), modules, make_fast(modules, built, quantize=None)
    )


def read(totals):
    (rows,) = read_rows(totals)
    return read_totals(rows)


@pytest.mark.parametrize("vocab", [1, 7, 130, 4000])
def test_what_rows_say_of_their_distribution(built, vocab):
    compute = compile_(built, decoder(), replace(SHAPES["tiny"], vocab=130))
    compute._shape = replace(compute._shape, vocab=vocab)
    logits = numbers(5, vocab + 30) * 9  # of which the last columns are nobody's
    logits[1, : vocab // 2] = logits[1].max() + 1.0  # the first of equals
    mine, exact = logits[:, :vocab], logits[:, :vocab].double()
    found = read(compute.totals(logits))
    assert [each.likeliest for each in found] == mine.argmax(-1).tolist()
    assert [each.largest for each in found] == mine.amax(-1).tolist()
    log_totals = (exact - exact.amax(-1, keepdim=True)).exp().sum(-1).log()
    assert torch.allclose(torch.tensor([each.log_total for each in found]).double(), log_totals, atol=2e-6)
    for row, each in enumerate(found):  # whoever else is asking
        assert read(compute.totals(logits[row : row + 1])) == [each]
    logits[2, vocab - 1] = torch.nan
    bad = read(compute.totals(logits))
    assert not math.isfinite(bad[2].log_total)
    assert [bad[0], bad[4]] == [found[0], found[4]]


# Compiling.


def test_a_compiler_that_fails_is_no_fault_of_the_server(built, tmp_path, monkeypatch):
    monkeypatch.setattr("superstep.serve.compute.kernels.build.SOURCES", tmp_path)
    for name in NAMES:
        (tmp_path / name).write_text("this is no C++", encoding="utf-8")
    failed = build(tmp_path / "built")
    assert failed.library is None
    assert failed.why.startswith("compiling decoder.cpp failed: ")
    assert "error" in failed.why
    assert "\n" not in failed.why
    assert list((tmp_path / "built").iterdir()) == []


def test_a_large_weight_lies_in_large_pages():
    x = torch.randn(3, 700, 1024).transpose(0, 1)
    laid = in_large_pages(x)
    assert torch.equal(laid, x)
    assert laid.is_contiguous()
    assert laid.data_ptr() % LARGE == 0
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        mapped = maps.read().split(f"{laid.data_ptr():x}-")[1].split("VmFlags:")[1].split("\n")[0]
    assert " hg" in mapped, "the system was not asked for them"
    small = torch.randn(8, 8).t()
    assert torch.equal(in_large_pages(small), small)


def test_what_was_compiled_is_not_compiled_again(built, compiled, monkeypatch):
    monkeypatch.setattr("superstep.kernels.compile_cpp.COMPILERS", ())
    assert build(compiled).library is not None
    monkeypatch.setattr("superstep.serve.compute.kernels.build.FLAGS", ("-O1",))
    assert build(compiled).why.startswith("compiling decoder.cpp failed: there is no compiler")


def test_a_processor_without_the_instructions_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr("superstep.serve.compute.kernels.build.processor_features", lambda: "flags : fpu avx512f")
    assert build(tmp_path).why == "this processor has no avx512bw"


def test_sources_are_part_of_the_package():
    assert {path.name for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")} == set(NAMES)
    assert "-ffast-math" not in FLAGS  # numbers that are none must stay so
