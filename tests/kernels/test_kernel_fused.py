"""What is computed between products against torch in fp64: values and gradients, rounded once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from superstep.kernels import compile_cpp, cpu_library, cross_entropy, fixed_point_sum, norm, rope, swiglu
from superstep.numerics.fixed_point import BLOCK, PARAMETER, OutOfRange

UNITS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["native", "x86-64-v3"])
def processor(request, monkeypatch, tmp_path_factory):
    """The library as it is compiled for this processor, and as one without AVX-512 has it."""
    if request.param != "native":
        others = {"-march=native": f"-march={request.param}", "-O3": "-O1"}
        flags = tuple(others.get(flag, flag) for flag in cpu_library.FLAGS)
        built = compile_cpp.build(cpu_library.SOURCES, flags, tmp_path_factory.getbasetemp() / "kernels")
        monkeypatch.setattr(cpu_library, "compile_library", lambda: built)
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)


def tables(shape, dtype):
    """Cosine and signed sine of any angles."""
    angle = torch.rand(*shape[:-1], 1, shape[-1] // 2) * 7
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def cases(dtype):
    """(name, ours, reference, what has gradients, what has none)."""
    torch.manual_seed(5)

    def numbers(*shape, scale=1.0):
        return (torch.randn(shape) * scale).to(dtype)

    for shape in ((3, 50, 48), (1, 1, 16), (2, 130, 4, 64)):
        given = numbers(*shape, scale=3.0), numbers(shape[-1])
        yield f"norm {shape}", partial(norm.rms_norm, eps=1e-5), partial(norm.reference, eps=1e-5), given, ()
    for shape in ((7,), (3, 5, 16), (2, 129, 161)):
        given = numbers(*shape, scale=4.0), numbers(*shape)
        yield f"swiglu {shape}", swiglu.swiglu, swiglu.reference, given, ()
    far = torch.tensor([-200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0]).to(dtype)
    yield "swiglu far", swiglu.swiglu, swiglu.reference, (far, torch.ones(7, dtype=dtype)), ()
    for shape, of in (((2, 9, 3, 32), (9, 32)), ((2, 9, 3, 64), (2, 9, 64)), ((1, 1, 1, 128), (1, 128))):
        yield f"rope {shape}", rope.turn, rope.reference, (numbers(*shape),), tables(of, dtype)
    whole = numbers(2, 9, 3, 64)  # a slice of something larger
    yield (
        "rope of a slice",
        lambda x, *t: rope.turn(x[..., :32], *t),
        lambda x, *t: rope.reference(x[..., :32], *t),
        (whole,),
        tables((9, 32), dtype),
    )


def both(ours, reference, given, fixed):
    """Result and gradients of either, those of the reference in fp64 of the same numbers."""
    found = []
    for function, of in ((ours, lambda x: x), (reference, lambda x: x.double())):
        inputs = [of(x.detach()).requires_grad_() for x in given]
        for x in inputs:
            x.grad_dtype = None  # a gradient may be of more digits than what it is of
        out = function(*inputs, *map(of, fixed))
        grad = torch.linspace(-1, 1.5, out.numel()).view(out.shape).bfloat16()
        found.append([out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_compute_what_torch_does_in_fp64(processor, dtype):
    for name, ours, reference, given, fixed in cases(dtype):
        for found, wanted in zip(*both(ours, reference, given, fixed), strict=True):
            assert found.shape == wanted.shape
            size = wanted.abs().mean()
            allowed = (wanted.abs() * 0.51 + size * 0.02) * UNITS[dtype] + wanted.abs().amax() * 60 * 2.0**-23 / 8
            assert ((found.double() - wanted).abs() <= allowed).all(), (name, (found.double() - wanted).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rows", "width", "columns"), [(5, 37, 37), (3, 64, 41), (2, 16, 0), (4, 4096, 4096)])
def test_rows_of_logits(processor, dtype, rows, width, columns, temperature):
    torch.manual_seed(1)
    logits = (torch.randn(rows, width) * 8).to(dtype)
    targets = torch.randint(0, max(1, columns), (rows,))
    targets[0] = -100
    factor = torch.linspace(0.0, 2.0, rows)
    exact = logits.double().requires_grad_()
    lse, score = cross_entropy.row_sums(logits, targets, columns, temperature)
    if columns == 0:  # a rank whose whole part of the vocabulary is padding
        assert lse.tolist() == [-torch.inf] * rows
        assert score.tolist() == [0.0] * rows
        lse = torch.zeros(rows)
    else:
        wanted = cross_entropy.reference(exact / temperature, targets, columns)
        torch.testing.assert_close((lse, score), tuple(x.detach().float() for x in wanted), rtol=1e-6, atol=1e-5)
        ((wanted[0] - wanted[1]) * factor).sum().backward()
    cross_entropy.row_gradients_(logits, targets, columns, lse, factor, temperature)
    gradient = torch.zeros_like(exact) if exact.grad is None else exact.grad
    error = (logits.double() - gradient).abs()
    assert (error <= gradient.abs() * (0.51 * UNITS[dtype] + 2e-5) + 1e-9).all()
    assert (logits[0] == 0).all(), "of no factor there is no gradient"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(processor, bad):
    x = torch.ones(4, 32)
    x[1, 3] = bad
    assert norm.rms_norm(x, torch.ones(32), 1e-5)[1].isnan().any()
    if bad != bad:
        assert swiglu.swiglu(x, x)[1].isnan().any()
    lse, _ = cross_entropy.row_sums(x, torch.zeros(4, dtype=torch.long), 32)
    assert not lse[1].isfinite()
    assert lse[0].isfinite()


@pytest.mark.parametrize("count", [1, 37, 3 * BLOCK + 5])
def test_sums_on_a_grid_are_torch_s_to_the_bit(processor, count):
    torch.manual_seed(2)
    values = torch.randn(count) * torch.logspace(-12, 3, count)
    into = torch.randint(-(2**60), 2**60, (count,))
    wanted = into + PARAMETER.put_(values.clone())
    assert fixed_point_sum.takes(into, values)
    PARAMETER.add(into, values)
    assert torch.equal(into, wanted)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 2.0**12])
def test_what_has_no_room_on_the_grid_is_refused(processor, bad):
    values = torch.zeros(100)
    values[71] = bad
    with pytest.raises(OutOfRange, match="has a term of"):
        PARAMETER.add(torch.zeros(100, dtype=torch.int64), values)
    values[71] = 2.0**12 - 1
    PARAMETER.add(torch.zeros(100, dtype=torch.int64), values)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 16), (100, 208)])
def test_products_on_a_grid_are_chunk_by_chunk(processor, dtype, outputs, inputs):
    """Right; the same for some rows and columns of it; and every chunk's product is cut off at the grid by itself."""
    torch.manual_seed(4)
    grad, x = (0.01 * torch.randn(3, 24, outputs)).to(dtype), torch.randn(3, 24, inputs).to(dtype)
    into = torch.randint(-(2**40), 2**40, (outputs, inputs))
    sums = into.clone()
    assert PARAMETER.add_products(sums, grad, x, 4)
    pairs = zip(grad.float().chunk(4, dim=1), x.float().chunk(4, dim=1), strict=True)
    products = [torch.einsum("bso,bsi->oi", a.double(), b.double()) for a, b in pairs]
    assert (PARAMETER.take(sums - into) - sum(products)).abs().max() < 1e-6
    alone = into.clone()
    for a, b in zip(grad.chunk(4, dim=1), x.chunk(4, dim=1), strict=True):
        assert PARAMETER.add_products(alone, a, b, 1)
    assert torch.equal(alone, sums)
    some = into[2:, 16:].clone() if inputs > 16 else into[2:].clone()
    assert PARAMETER.add_products(some, grad[..., 2:], x[..., 16:] if inputs > 16 else x, 4)
    assert torch.equal(some, sums[2:, 16:] if inputs > 16 else sums[2:])


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("width", [1, 8, 24])
def test_products_of_a_few_columns_have_the_bits_of_all(processor, dtype, width):
    """As where a tensor-parallel rank has one head of 8 numbers; whatever the strides."""
    torch.manual_seed(4)
    grad, x = torch.randn(3, 24, 40).to(dtype), torch.randn(3, 24, 48).to(dtype)
    whole = torch.zeros(40, 48, dtype=torch.int64)
    assert PARAMETER.add_products(whole, grad, x, 4)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (grad, x)]
    for left, right in ((grad, x), turned):
        for at in range(0, 48, width):
            some = torch.ones(40, width, dtype=torch.int64)
            assert PARAMETER.add_products(some, left, right[..., at : at + width], 4)
            assert torch.equal(some - 1, whole[:, at : at + width])


@pytest.mark.parametrize("dtype", UNITS)
def test_grouped_products_are_those_of_each_group_s_chunks(processor, dtype):
    """Chunks of any rows in any order, and none: as if each were a product of its own."""
    torch.manual_seed(5)
    grad, x = (0.01 * torch.randn(60, 70)).to(dtype), torch.randn(60, 80).to(dtype)
    order, sizes = torch.randperm(60)[:50], (7, 0, 13, 0, 0, 30)
    starts = torch.tensor((0, *sizes)).cumsum(0)
    sums = torch.randint(-(2**40), 2**40, (2, 70, 80))
    wanted = sums.clone()
    assert PARAMETER.add_grouped_products(sums, grad, x, order, starts)
    for number, rows in enumerate(order.split(sizes)):
        if len(rows):
            assert PARAMETER.add_products(wanted[number // 3], grad[rows][None], x[rows][None], 1)
    assert torch.equal(sums, wanted)
    grad[order[3]] = 2.0**14
    with pytest.raises(OutOfRange, match=r"has a term of"):
        PARAMETER.add_grouped_products(sums, grad, x, order, starts)


@pytest.mark.parametrize("bad", [torch.nan, 2.0**12])
def test_a_product_without_room_is_refused_with_its_size(processor, bad):
    grad, x = torch.zeros(1, 8, 3), torch.ones(1, 8, 16)
    grad[0, 5, 1] = bad
    with pytest.raises(OutOfRange, match=r"has a term of (nan|4.1e.03),"):
        PARAMETER.add_products(torch.zeros(3, 16, dtype=torch.int64), grad, x, 2)


@pytest.mark.parametrize("dtype", UNITS)
def test_a_norm_s_gradient_on_a_grid(processor, dtype):
    torch.manual_seed(6)
    grad, x = (torch.randn(2, 11, 48).to(dtype) for _ in "gx")
    weight = (1 + torch.rand(48)).to(dtype)
    wide = [each.double().requires_grad_() for each in (x, weight)]
    rights = torch.autograd.grad(norm.reference(*wide, 1e-5), wide, grad.double())
    _, r = norm.rms_norm_operator(x, weight, 1e-5)
    into = torch.zeros(48, dtype=torch.int64)
    scale, limit = 2.0**PARAMETER.bits, PARAMETER.limit
    dx, is_within = norm.backward_on_grid(grad, x, weight, r, into_D=into, scale=scale, limit=limit)
    assert is_within
    for mine, right in zip((dx, PARAMETER.take(into)), rights, strict=True):
        assert (mine - right).norm() < UNITS[dtype] * right.norm()
    rows = torch.zeros_like(into)
    for b in range(2):
        for s in reversed(range(11)):
            one = norm.backward_on_grid(
                grad[b, s], x[b, s], weight, r[b, s : s + 1], into_D=rows, scale=scale, limit=limit
            )
            assert torch.equal(one[0], dx[b, s])
    assert torch.equal(rows, into)
    assert not norm.backward_on_grid(grad, x, weight, r, into_D=into, scale=scale, limit=0.01)[1]
    assert torch.equal(norm.backward_on_grid(grad, x, weight, r, into_D=None, scale=scale, limit=limit)[0], dx)


def test_threads_change_no_bit(processor, monkeypatch):
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append([both(*case)[0] for _, *case in cases(torch.bfloat16)])
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rehearsal_sees_their_shapes(processor):
    with FakeTensorMode():
        x, weight = torch.empty(2, 3, 32, requires_grad=True), torch.empty(32, requires_grad=True)
        out = swiglu.swiglu(norm.rms_norm(x, weight, 1e-5), x)
        assert [g.shape for g in torch.autograd.grad(out, (x, weight), out)] == [(2, 3, 32), (32,)]


def test_other_tensors_are_left_to_torch():
    assert not norm.takes(torch.ones(2, 24), torch.ones(24))
    assert not norm.takes(torch.ones(2, 16).double(), torch.ones(16).double())
    assert not norm.takes(torch.ones(2, 16).bfloat16(), torch.ones(16))
    assert not swiglu.takes(torch.ones(2, 16), torch.ones(16))
    cos, sin = tables((4, 16), torch.float32)
    assert not rope.takes(torch.ones(2, 4, 1, 16), cos, sin)
