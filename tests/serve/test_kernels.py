"""Operations that are compiled here, beside torch's own: the same numbers, within their rounding."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from superstep.model.decoder import Decoder
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.plan.model.shape import SHAPES
from superstep.serve.compute.decode_attention import Places, gathered_attention, paged_attention
from superstep.serve.compute.fast import Turn, make_fast
from superstep.serve.compute.few_rows import FEW, few_rows, few_rows_of_8_bits
from superstep.serve.compute.kernels.build import FLAGS, SOURCES, Built, build
from superstep.serve.compute.packed import packed
from superstep.serve.compute.quantize import format_named, to_8_bits

BF16, FP32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def products(compiled):
    built = build("products", compiled)
    if built.ops is None:
        pytest.skip(built.why)
    return built


@pytest.fixture(scope="module")
def attention(compiled):
    built = build("attention", compiled)
    if built.ops is None or not built.ops.has_bf16():
        pytest.skip(built.why or "this machine has no products of bf16")
    return built


def numbers(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 64])
@pytest.mark.parametrize("outputs", [1, 6, 130])
def test_products_of_few_rows(products, rows, outputs):
    if not products.ops.has_bf16():
        pytest.skip("this machine has no products of bf16")
    x, weight, bias = (t.bfloat16() for t in (numbers(rows, 96), numbers(outputs, 96, seed=1), numbers(outputs)))
    pack = few_rows(products, packed)
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    out = pack(weight, bias)(x[None])[0]
    assert ((out.double() - exact).abs() <= 97 * FP32 * size + BF16 * exact.abs()).all()
    for row in range(rows):  # a row is computed as if it were alone
        assert torch.equal(pack(weight, bias)(x[row : row + 1])[0], out[row]) or rows > FEW


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_of_8_bits_of_few_rows(products, rows):
    if not products.ops.has_int8():
        pytest.skip("this machine has no products of 8 bits")
    x, weight, bias = (t.bfloat16() for t in (numbers(rows, 128), numbers(70, 128, seed=1), numbers(70)))
    row = format_named("w8a8")
    x[0] = 0
    mine, torchs = few_rows_of_8_bits(products, row)(weight, bias)(x), row.pack(weight, bias)(x)
    # The codes are equal but where a number is half way between two, or the division is rounded in another way.
    step = x.float().abs().amax(1, keepdim=True) / 127 * to_8_bits(weight).weight().abs().amax(1)
    assert ((mine.float() - torchs.float()).abs() <= 2 * step + 3 * BF16 * torchs.float().abs() + FP32).all()


def test_norms_are_the_models_own(products):
    for width in (64, 100, 768):
        norm = RMSNorm(width, 1e-5).bfloat16().requires_grad_(False)
        norm.weight.copy_(numbers(width))
        x = numbers(3, 5, width, seed=2).bfloat16()
        out = products.ops.rms_norm(x, norm.weight, norm.eps)
        torch.testing.assert_close(out, norm(x), rtol=BF16, atol=0)  # the same number, or a neighbour


def test_gates_are_the_models_own(products):
    both = numbers(5, 200).bfloat16() * 4
    gate, up = both.split([100, 100], -1)
    exact = F.silu(gate.double()) * up.double()
    assert ((products.ops.gated(gate, up).double() - exact).abs() <= (BF16 + 8 * FP32) * exact.abs()).all()


def test_turns_are_the_models_own(products):
    rope = Rope(SHAPES["tiny"])
    positions = torch.tensor([[0, 1, 7, 900, 3]])
    x = numbers(1, 5, 6, 16).bfloat16()[:, :, :4]  # rows that lie apart
    turn = Turn(rope, products.ops)
    for at in (positions, positions + 1, positions):
        # Torch's operations round a product before the sum.
        torch.testing.assert_close(turn(x, at), rope(x, at), rtol=2 * BF16, atol=2 * BF16)
    assert torch.equal(turn(x), rope(x))


@pytest.mark.parametrize("quantize", [None, "w8a8", "int8"])
def test_a_fast_model_gives_nearly_the_same_logits(products, quantize):
    torch.manual_seed(3)
    model = Decoder(replace(SHAPES["tiny"], vocab=128, ffn=192, tied=False)).bfloat16().requires_grad_(False)
    expected = model(torch.arange(24).view(2, 12)).float()
    linears = make_fast([model], products, quantize=quantize)
    assert len(linears) == 2 * 7 + 1
    error = (model(torch.arange(24).view(2, 12)).float() - expected).norm() / expected.norm()
    assert error < (0.02 if quantize is None else 0.05)


def test_what_is_not_there_leaves_torch_in_its_place():
    none = Built(None, "no compiler")
    row = format_named("w8a8")
    weight = numbers(8, 64).bfloat16()
    assert few_rows(none, packed) is packed
    assert few_rows_of_8_bits(none, row)(weight, None)(weight).shape == (8, 8)


def test_a_compiler_that_fails_is_no_fault_of_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr("superstep.serve.compute.kernels.build.SOURCES", tmp_path)
    (tmp_path / "broken.cpp").write_text("this is no C++", encoding="utf-8")
    built = build("broken", tmp_path / "built")
    assert built.ops is None
    assert built.why.startswith("compiling broken.cpp failed: ")
    assert "error" in built.why
    assert "\n" not in built.why
    assert list((tmp_path / "built").iterdir()) == []


def test_two_folders_in_one_process(products, compiled, tmp_path):
    for library in compiled.glob("products-*.so"):
        (tmp_path / library.name).write_bytes(library.read_bytes())
    again = build("products", tmp_path)
    assert again.ops is not None
    assert again.ops.has_bf16() == products.ops.has_bf16()


def test_what_was_compiled_is_not_compiled_again(products, compiled, monkeypatch):
    monkeypatch.setattr("superstep.serve.compute.kernels.build.COMPILERS", ())
    assert build("products", compiled).ops is not None
    monkeypatch.setattr("superstep.serve.compute.kernels.build.FLAGS", ("-O1",))
    assert build("products", compiled / "elsewhere").why.startswith(
        "compiling products.cpp failed: there is no compiler"
    )


def texts(lengths, *, page_tokens=16, kv_heads=2, width=64, seed=0):
    """Keys and values of some texts, in pages of no order, and beside them numbers that are none."""
    held = [math.ceil(length / page_tokens) for length in lengths]
    order = torch.randperm(sum(held) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    keys, values = (torch.full(((sum(held) + 3) * page_tokens, kv_heads, width), math.nan).bfloat16() for _ in range(2))
    pages = torch.zeros(len(lengths), max(held), dtype=torch.int32)
    for number, (count, length) in enumerate(zip(held, lengths, strict=True)):
        mine = [order.pop() for _ in range(count)]
        pages[number, :count] = torch.tensor(mine)
        for place in range(length):
            slot = mine[place // page_tokens] * page_tokens + place % page_tokens
            keys[slot], values[slot] = numbers(2, kv_heads, width, seed=1000 * number + place).bfloat16()
    return keys, values, pages


@pytest.mark.parametrize("heads", [2, 6, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_pages(attention, heads, window):
    lengths = [1, 15, 16, 17, 64, 65, 200]
    keys, values, pages = texts(lengths)
    q = numbers(len(lengths), heads, 64, seed=9).bfloat16() * 3
    ends = torch.tensor(lengths, dtype=torch.int32)
    first = (ends - window).clamp(min=0) if window else torch.zeros_like(ends)
    places = Places(pages, first, ends, 16)
    out = paged_attention(attention, q, keys, values, places)
    slow = gathered_attention(q, keys, values, places)
    # Each is a mean of values, so that errors of the shares, of some roundings of bf16, are of the values' own size.
    assert (out.float() - slow.float()).abs().max() < 4 * BF16 * values[~values.isnan()].abs().max()
    exact = exact_attention(q, keys, values, pages, first, ends)
    assert (out.double() - exact).abs().max() < 4 * BF16
    assert (slow.double() - exact).abs().max() < 16 * BF16


def exact_attention(q, keys, values, pages, first, ends):
    rows = []
    for row, (begin, end) in enumerate(zip(first.tolist(), ends.tolist(), strict=True)):
        slots = [int(pages[row, place // 16]) * 16 + place % 16 for place in range(begin, end)]
        k, v = (x[slots].double().repeat_interleave(q.shape[1] // keys.shape[1], 1) for x in (keys, values))
        share = (torch.einsum("nh,lnh->nl", q[row].double(), k) / q.shape[2] ** 0.5).softmax(-1)
        rows.append(torch.einsum("nl,lnh->nh", share, v))
    return torch.stack(rows)


def test_sources_are_part_of_the_package():
    assert {path.name for path in SOURCES.glob("*.cpp")} == {"products.cpp", "attention.cpp"}
    assert "-ffast-math" not in FLAGS  # numbers that are none must stay so
