"""What CUDA's kernels refuse is refused at the call, and what they take is taken."""

import pytest
import torch
import torch.nn.functional as F

from operators import SCORES, Operators
from strict_ranks import device_module

pytestmark = pytest.mark.strict

GPU = torch.device("cuda", 0)
ATEN = torch.ops.aten


def made(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def ends(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype).to(GPU)


def flash(q, k, *, is_causal=False):
    return ATEN._scaled_dot_product_flash_attention(q, k, k, 0.0, is_causal)[0]


def efficient(q, k, bias=None):
    return ATEN._scaled_dot_product_efficient_attention(q, k, k, bias, True, 0.0, False)


def efficient_back(q, sums):
    seed = torch.zeros((), dtype=torch.int64, device=GPU)
    wanted = [True, True, True, False]
    return ATEN._scaled_dot_product_efficient_attention_backward(q, q, q, q, None, q, sums, seed, seed, 0.0, wanted)


def flash_of_many(starts, keys=2):
    q, k = made(10, 4, 8), made(10, keys, 8)
    return ATEN._flash_attention_forward(q, k, k, starts, starts, 6, 6, 0.0, True, False)


REFUSED = {
    "grouped, odd width": (
        lambda: F.grouped_mm(made(6, 12), made(2, 12, 8), offs=ends(2, 4)), "multiple of 16 bytes, got 12"),
    "grouped, one in two columns": (
        lambda: F.grouped_mm(made(6, 32)[:, ::2], made(2, 16, 8), offs=ends(2, 4)), "Invalid strides"),
    "grouped, moved": (
        lambda: F.grouped_mm(made(6 * 16 + 1)[1:].view(6, 16), made(2, 16, 8), offs=ends(2, 4)), "data_ptr"),
    "grouped, wide ends": (
        lambda: F.grouped_mm(made(6, 16), made(2, 16, 8), offs=ends(2, 4, dtype=torch.int64)), "int32"),
    "grouped, many": (
        lambda: F.grouped_mm(made(6, 16), made(1024, 16, 8), offs=ends(*[6] * 1024)), "1024 groups"),
    "flash, fp32": (lambda: flash(*[made(1, 2, 4, 8, dtype=torch.float32)] * 2), "only support fp16 and bf16"),
    "flash, odd width": (lambda: flash(*[made(1, 2, 4, 6)] * 2), "multiple of 8"),
    "flash, wide": (lambda: flash(*[made(1, 2, 4, 264)] * 2), "at most 256"),
    "flash, columns apart": (lambda: flash(*[made(1, 2, 4, 16)[..., ::2]] * 2), "contiguous last dimension"),
    "flash, 3 heads for 2": (lambda: flash(made(1, 3, 4, 8), made(1, 2, 4, 8)), "must divide"),
    "flash, wide starts": (lambda: flash_of_many(ends(0, 4, 10, dtype=torch.int64)), "must have dtype int32"),
    "flash of many, 3 heads for 4": (lambda: flash_of_many(ends(0, 4, 10), keys=3), "must divide"),
    "efficient, grouped heads": (lambda: efficient(made(1, 4, 4, 8), made(1, 2, 4, 8)), "2 heads of keys"),
    "efficient, odd width": (lambda: efficient(*[made(1, 2, 4, 6, dtype=torch.float32)] * 2), "no kernel found"),
    "efficient, bias of fp32": (
        lambda: efficient(*[made(1, 2, 4, 8)] * 2, made(1, 2, 4, 8, dtype=torch.float32)), "invalid dtype for bias"),
    "efficient, bias of odd rows": (
        lambda: efficient(*[made(1, 2, 5, 8)] * 2, made(1, 2, 5, 5)), "attn_bias is not correctly aligned"),
    "efficient, few sums": (
        lambda: efficient_back(made(1, 2, 40, 8), made(1, 2, 40, dtype=torch.float32)), "LSE is not correctly aligned"),
    "wide product of two dtypes": (
        lambda: torch.mm(made(4, 8), made(8, 4).half(), out_dtype=torch.float32, out=made(4, 4).float()),
        "must be the same"),
    "wide product of fp32": (
        lambda: torch.mm(*[made(4, 4).float()] * 2, out_dtype=torch.float64, out=made(4, 4).double()), "fp32 for fp16"),
    "wide product added to fp16": (
        lambda: torch.addmm(made(4, 4).half(), *[made(4, 4)] * 2, out_dtype=torch.float32, out=made(4, 4).float()),
        "self dtype must match"),
    "steps counted on the host": (
        lambda: torch._fused_adamw_(
            *([[made(4).float()] for _ in range(4)]), [], [torch.ones(())],
            lr=0.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False),
        "same device, but found cpu beside cuda for argument state_steps"),
    "a factor of many on the host": (
        lambda: torch._foreach_mul_([made(4)], torch.ones(())), "same device, but found cpu"),
    "rows named on the host": (
        lambda: torch.index_select(made(4), 0, torch.zeros(2, dtype=torch.long)), "same device, but found cpu"),
    "a storage of another GPU": (lambda: made(4).set_(made(4).to("cuda:1")), "storage of a tensor on device"),
    "grouped, ends on another GPU": (
        lambda: F.grouped_mm(made(6, 16), made(2, 16, 8), offs=ends(2, 4).to("cuda:1")), "on the same device"),
    "joined with another GPU's": (lambda: torch.cat([made(4), made(4).to("cuda:1")]), "on the same device"),
    "values to put on the host": (
        lambda: made(4).index_put_((torch.tensor([0, 1]),), torch.ones(2).bfloat16()), "same device, but found cpu"),
}  # fmt: skip


DRAWS = {
    "randn": lambda generator: torch.randn(4, device=GPU, generator=generator),
    "randperm": lambda generator: torch.randperm(4, device=GPU, generator=generator),
    "multinomial": lambda generator: torch.multinomial(torch.ones(4, device=GPU), 2, generator=generator),
    "uniform": lambda generator: torch.empty(4, device=GPU).uniform_(generator=generator),
}
REFUSED |= {
    f"{name} by the host's generator": (lambda draw=draw: draw(torch.Generator()), "Expected a 'cuda' device type for")
    for name, draw in DRAWS.items()
}

WHOLE = {"dtype": torch.int64, "device": GPU}
OF_INTEGERS = {
    "addmm_cuda": [
        lambda: torch.ones(4, 4, **WHOLE) @ torch.ones(4, 4, **WHOLE),
        lambda: F.linear(torch.ones(4, 4, **WHOLE), torch.ones(4, 4, **WHOLE)),
        lambda: torch.addmm(*[torch.ones(4, 4, **WHOLE)] * 3),
        lambda: torch.ones(4, 4, **WHOLE).addbmm_(*[torch.ones(2, 4, 4, **WHOLE)] * 2),
    ],
    "baddbmm_cuda": [
        lambda: torch.bmm(*[torch.ones(2, 4, 4, **WHOLE)] * 2),
        lambda: torch.einsum("bij,bjk->bik", *[torch.ones(2, 4, 4, **WHOLE)] * 2),
    ],
    "addmv_impl_cuda": [lambda: torch.mv(torch.ones(4, 4, **WHOLE), torch.ones(4, **WHOLE))],
    "dot": [lambda: torch.dot(*[torch.ones(4, **WHOLE)] * 2)],
    "max_pool2d_with_indices_out_cuda_frame": [lambda: F.max_pool2d(torch.ones(1, 1, 4, 4, **WHOLE), 2)],
}
REFUSED |= {
    f"{kernel} of integers, {number}": (call, f"\"{kernel}\" not implemented for 'Long'")
    for kernel, calls in OF_INTEGERS.items()
    for number, call in enumerate(calls)
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_gpus_kernel_refuses(name):
    call, why = REFUSED[name]
    with pytest.raises(RuntimeError, match=why):
        call()


def grouped(*where):
    return F.grouped_mm(made(6, 16), made(2, 16, 8), offs=ends(*where))


ASSERTED = {
    "groups that end backwards": (lambda: grouped(4, 2), "greater or equal"),
    "groups beyond the rows": (lambda: grouped(4, 7), "less than tensor size"),
    "groups within a row": (lambda: F.grouped_mm(made(8, 16), made(16, 8), offs=ends(4, 16)), "multiple of 16"),
}


@pytest.mark.parametrize("name", ASSERTED)
def test_what_a_kernel_asserts_is_said_where_the_host_waits(name):
    call, why = ASSERTED[name]
    with pytest.raises(RuntimeError, match=f"device-side assert triggered: .*{why}"):
        call().cpu()


def test_rows_of_no_group_are_left_as_they_were():
    x, weight = made(6, 16), made(2, 16, 8)
    out = F.grouped_mm(x, weight, offs=ends(2, 4)).cpu()
    wanted = torch.stack([x.cpu()[:2] @ weight.cpu()[0], x.cpu()[2:4] @ weight.cpu()[1]])
    assert torch.equal(out[:4].view(2, 2, 8), wanted)
    assert out[4:].isnan().all()


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, (9, 0)), (torch.bfloat16, (8, 0))], ids=str)
def test_where_there_is_no_kernel_for_groups_the_host_waits(dtype, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    given = made(4, 16, dtype=dtype), made(2, 16, 8, dtype=dtype), ends(2, 4)
    device_module().take_host_waits()
    F.grouped_mm(given[0], given[1], offs=given[2])
    assert [where[:17] for where in device_module().take_host_waits()] == ["copy_ to the host"]


def test_numbers_of_the_hosts_come_along_where_a_gpu_takes_them():
    x, number = made(4, dtype=torch.float32), torch.tensor(2.0)
    found = [
        x * number,
        number - x,
        x // number,
        x.clone().eq_(number),
        x.masked_fill(x > 0, number),
        x.clone().fill_(number),
    ]
    here = x.cpu()
    wanted = [
        here * 2,
        2 - here,
        here // 2,
        here.clone().eq_(2),
        here.masked_fill(here > 0, 2.0),
        torch.full((4,), 2.0),
    ]
    for mine, cpus in zip(found, wanted, strict=True):
        assert torch.equal(mine.cpu(), cpus)


def test_many_tensors_are_multiplied_by_one_factor_of_their_device():
    many, factor = [made(4, dtype=torch.float32), made(2, 3, dtype=torch.float32)], torch.tensor(2.0, device=GPU)
    twice = torch._foreach_mul(many, factor)
    torch._foreach_mul_(many, factor)
    for found, mine in zip(twice, many, strict=True):
        assert torch.equal(found.cpu(), 2 * made(*found.shape, dtype=torch.float32).cpu())
        assert torch.equal(found.cpu(), mine.cpu())


def test_the_last_query_of_flash_attention_sees_the_last_key():
    q, k = made(1, 2, 3, 8), made(1, 2, 5, 8, seed=1)
    is_seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    wanted = F.scaled_dot_product_attention(*(x.cpu().float() for x in (q, k, k)), attn_mask=is_seen)
    torch.testing.assert_close(flash(q, k, is_causal=True).cpu().float(), wanted, atol=2e-2, rtol=2e-2)


def test_products_of_no_integers_are_taken():
    assert (torch.ones(4, 0, **WHOLE) @ torch.ones(0, 3, **WHOLE)).tolist() == [[0] * 3] * 4


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_the_gpu_draws_what_its_state_says(name):
    draw, generator = DRAWS[name], torch.Generator(device="cuda").manual_seed(3)
    state, first, second = generator.get_state(), draw(generator).cpu(), draw(generator).cpu()
    assert generator.get_offset() == 8
    generator.set_state(state)
    again = generator.clone_state()
    assert torch.equal(draw(generator).cpu(), first)
    assert torch.equal(draw(again).cpu(), first)
    assert torch.equal(draw(generator).cpu(), second)


def test_the_generators_of_gpus_are_those_of_their_seeds():
    torch.manual_seed(5)
    of_second = torch.cuda.default_generators[1]
    assert (of_second.device, of_second.initial_seed()) == (torch.device("cuda:1"), 5)
    torch.randn(4, device="cuda:1")
    assert of_second.get_offset() == 4
    torch.cuda.set_rng_state(torch.cuda.get_rng_state("cuda:1"), GPU)
    assert torch.cuda.default_generators[0].get_offset() == 4
    assert [len(state) for state in torch.cuda.get_rng_state_all()] == [16] * torch.cuda.device_count()


CHOICES = {
    "heads that are filled up": ((2, 2, 4, 6), torch.bfloat16, {}, False),
    "more keys than queries": ((2, 2, 6, 8), torch.bfloat16, {"is_causal": True}, False),
    "grouped heads": ((2, 1, 4, 8), torch.bfloat16, {"enable_gqa": True}, False),
    "grouped heads with a mask": ((2, 1, 4, 8), torch.bfloat16, {"enable_gqa": True, "attn_mask": True}, True),
    "grouped heads of fp32": ((2, 1, 4, 8), torch.float32, {"enable_gqa": True}, True),
    "odd heads of fp32": ((2, 2, 4, 6), torch.float32, {}, True),
}
"""Query heads, key heads, keys and width; the dtype; how it is called; and whether scores are whole."""


@pytest.mark.parametrize("name", CHOICES)
def test_scores_are_made_whole_where_no_kernel_takes_the_heads(name):
    (query_heads, key_heads, keys, width), dtype, how, is_whole = CHOICES[name]
    q, k = made(1, query_heads, 4, width, dtype=dtype), made(1, key_heads, keys, width, dtype=dtype)
    if "attn_mask" in how:
        how = how | {"attn_mask": torch.ones(4, keys, dtype=torch.bool, device=GPU)}
    with Operators() as operators:
        F.scaled_dot_product_attention(q, k, k, **how)
    assert bool(SCORES & set(operators.called)) == is_whole


def test_a_kernel_that_is_switched_off_is_not_chosen():
    q = made(1, 2, 4, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), Operators() as operators:
        F.scaled_dot_product_attention(q, q, q)
    assert SCORES & set(operators.called)
