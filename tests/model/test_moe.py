"""A mixture of experts on one device: the block, its grouped products, its losses, its many tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import small
from plans import examples
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.mixture.experts import (
    GroupedLinear,
    add_outer_products,
    grouped_linear,
    kernel_outer_products,
    kernel_products,
    products,
    sort_by_expert,
)
from superstep.model.mixture.router import NOBODY
from superstep.model.moe import MixtureOfExperts
from superstep.model.unit import global_specs, global_tensors, initial, parameters
from superstep.numerics.loss import cross_entropy_sum
from superstep.plan.config import ModelConfig, TrainConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.train.proof.reference import reference_steps

ROUTERS = ["dropless", "switch", "top2", "noisy-topk"]
ROUTER = pytest.mark.parametrize("router", ROUTERS)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def shape_for(router="dropless", **fields):
    fields = {"experts": 4, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 24, "vocab": 64} | fields
    return shape_of(ModelConfig(name="tiny", router=router, **fields))


def block_of(shape, dtype=torch.float64, **now):
    block = MixtureOfExperts(shape, 3).to(dtype)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0.0, param.shape[-1] ** -0.5)
    return block, LocalDispatch(DispatchContext(**now))


def training(rows, batch=None):
    return {"sequences": tuple(rows), "batch_sequences": batch or len(rows), "seed": 1, "step": 5}


# ---------------------------------------------------------------- grouped products


@examples(60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_a_grouped_linear_is_a_linear_for_each_expert(rows, nobodys):
    rows_E = torch.tensor(rows)
    weight = torch.randn(len(rows), 6, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(sum(rows) + nobodys, 4, dtype=torch.float64, requires_grad=True)
    expert_R = torch.arange(len(rows)).repeat_interleave(rows_E)
    expected = torch.einsum("ri,roi->ro", x[: sum(rows)], weight[expert_R])
    ours = grouped_linear(x, weight, rows_E)
    torch.testing.assert_close(ours[: sum(rows)], expected)
    assert (ours[sum(rows) :] == 0).all()

    grad = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, (x, weight), grad)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight), grad[: sum(rows)]))


def test_the_weights_gradient_goes_straight_where_it_is_told():
    # Small whole numbers: every order of a sum, fused or not, gives the same bits.
    rows_E, x = torch.tensor([3, 0, 2]), torch.randint(-8, 8, (6, 4)).float()
    linear = GroupedLinear(3, 4, 5)
    for dtype in (torch.float32, torch.bfloat16):
        weight, into = linear.weight.detach().to(dtype).requires_grad_(), torch.ones(3, 5, 4)
        rows = x.to(dtype).requires_grad_()
        out = grouped_linear(rows, weight, rows_E, partial(add_outer_products, into))
        out.backward(torch.ones_like(out))
        expected = torch.autograd.grad(grouped_linear(rows, weight, rows_E).sum(), weight)[0]
        assert weight.grad is None
        assert torch.equal(into - 1, (1 + expected.float()) - 1)


@pytest.mark.parametrize("rows", [[4, 0, 3], [0, 0, 7], [0, 0, 0], [2, 5, 0]])
def test_the_kernel_for_all_experts_gives_what_the_loop_gives(rows):
    """The kernel itself is a GPU's; torch's stand-in for it on a CPU takes the same arguments."""
    rows_E, size = torch.tensor(rows), sum(rows) + 2
    x, grad = torch.randn(size, 16).bfloat16(), torch.randn(size, 8).bfloat16()
    weight = torch.randn(3, 8, 16).bfloat16()
    assert torch.equal(kernel_products(x, weight.transpose(1, 2), rows_E), products(x, weight.transpose(1, 2), rows_E))
    looped = torch.zeros_like(weight)
    add_outer_products(looped, grad, x, rows_E)
    assert torch.equal(kernel_outer_products(grad, x, rows_E), looped)


def test_rows_are_sorted_by_expert_and_those_of_nobody_come_last():
    order, rows = sort_by_expert(torch.tensor([[2, NOBODY], [0, 2], [NOBODY, 0]]), 3)
    assert order.tolist() == [2, 5, 0, 3, 1, 4]
    assert rows.tolist() == [2, 0, 2]


# ---------------------------------------------------------------- the block


def one_token_at_a_time(block, x_BSD, routing):
    """The definition: each token through its experts, weighted and summed."""
    y = torch.zeros_like(x_BSD)
    experts = block.experts
    for b, s, j in torch.cartesian_prod(*map(torch.arange, routing.expert.shape)).tolist():
        expert = int(routing.expert[b, s, j])
        if expert == NOBODY:
            continue
        x = x_BSD[b, s]
        inner = F.silu(experts.gate_proj.weight[expert] @ x) * (experts.up_proj.weight[expert] @ x)
        y[b, s] = y[b, s] + routing.weight[b, s, j] * (experts.down_proj.weight[expert] @ inner)
    return y + block.shared_experts(x_BSD) if block.shared_experts else y


@ROUTER
@pytest.mark.parametrize("shared", [0, 2])
def test_the_block_is_the_weighted_sum_of_its_experts_and_so_are_its_gradients(router, shared):
    shape = shape_for(router, shared_experts=shared)
    block, exchange = block_of(shape, **training([0, 1]))
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    wanted = [x, *block.parameters()]
    grad = torch.randn(2, 12, 32, dtype=torch.float64)
    # The losses are left to their own test.
    block.moe = replace(shape.moe, balance_weight=0.0, z_weight=0.0)
    ours, naive = block(x, exchange=exchange), one_token_at_a_time(block, x, block.route(x, exchange))
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(naive, wanted, grad), rtol=1e-9, atol=1e-12
    )


@ROUTER
def test_a_batch_cut_in_any_way_gives_the_same(router):
    """Outputs, gradients and counts: a row knows its number in the global batch, and nothing else matters."""
    shape = shape_for(router, z_weight=0.1)
    x = torch.randn(4, 12, 32, dtype=torch.float64)

    def run(cuts):
        block, exchange = block_of(shape)
        out, told = torch.empty_like(x), None
        for rows in cuts:
            exchange.now = DispatchContext(**training(rows, batch=4))
            y = block(x[rows], exchange=exchange)
            (y * torch.arange(1.0, 33)).sum().backward()
            out[rows] = y.detach()
        told = exchange.take_counts()[3]
        return out, [p.grad for p in block.parameters()], told

    torch.manual_seed(0)
    out, grads, told = run([[0, 1, 2, 3]])
    assert int(told.chosen.sum()) > 0
    for cuts in ([[0], [1], [2], [3]], [[2, 3], [0, 1]], [[3, 0, 1], [2]]):
        torch.manual_seed(0)
        other, other_grads, other_told = run(cuts)
        torch.testing.assert_close(other, out)
        torch.testing.assert_close(other_grads, grads)
        assert torch.equal(other_told.chosen, told.chosen)
        assert torch.equal(other_told.dropped, told.dropped)
        torch.testing.assert_close(other_told.balance, told.balance)
        torch.testing.assert_close(other_told.z, told.z)


@ROUTER
def test_the_losses_enter_the_backward_pass_as_if_they_had_been_added(router):
    shape = shape_for(router)
    block, exchange = block_of(shape, **training([4, 6], batch=8))
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    wanted, grad = [x, *block.gate.parameters()], torch.randn(2, 12, 32, dtype=torch.float64)

    def grads(balance, z):
        block.moe = replace(shape.moe, balance_weight=balance, z_weight=z)
        return torch.autograd.grad(block(x, exchange=exchange), wanted, grad)

    with_losses, without = grads(0.3, 0.7), grads(0.0, 0.0)
    routing = block.route(x, exchange)
    explicit = (0.3 * routing.balance.sum() + 0.7 * routing.z.sum()) / 8
    for ours, plain, added in zip(with_losses, without, torch.autograd.grad(explicit, wanted), strict=True):
        torch.testing.assert_close(ours - plain, added)
        assert added.abs().max() > 1e-4


def test_an_output_has_no_loss_in_it_with_a_gradient_or_without():
    shape = shape_for(balance_weight=5.0, z_weight=5.0)
    (block, exchange), x = block_of(shape, **training([0])), torch.randn(1, 12, 32, dtype=torch.float64)
    expected = one_token_at_a_time(block, x, block.route(x, exchange))
    torch.testing.assert_close(block(x, exchange=exchange), expected)
    with torch.no_grad():
        torch.testing.assert_close(block(x, exchange=exchange), expected)


@ROUTER
def test_a_block_computed_again_decides_the_same_and_is_told_of_once(router):
    """As under recomputation, whose first forward keeps no graph."""
    block, exchange = block_of(shape_for(router), **training([0, 1]))
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        first = block(x, exchange=exchange)
    again = checkpoint(block, x, exchange=exchange, use_reentrant=False)
    again.sum().backward()
    assert torch.equal(first, again)
    told = exchange.take_counts()[3]
    taken = 2 * 12 * block.moe.experts_per_token
    assert int(told.chosen.sum()) == taken if router != "top2" else int(told.chosen.sum()) <= taken
    assert exchange.take_counts() == {}


def test_what_is_told_adds_up_and_counts_what_was_dropped():
    shape = shape_for("switch", capacity_factor=0.5)
    (block, exchange), x = block_of(shape), torch.randn(2, 16, 32, dtype=torch.float64)
    for rows in ([0], [1]):
        exchange.now = DispatchContext(**training(rows, batch=2))
        block(x[rows], exchange=exchange)
    told = exchange.take_counts()[3]
    routing = block.route(x, exchange)
    assert told.chosen.tolist() == [int((routing.choice == e).sum()) for e in range(4)]
    kept = [int((routing.expert == e).sum()) for e in range(4)]
    assert (told.chosen - told.dropped).tolist() == kept
    assert int(told.dropped.sum()) > 0
    torch.testing.assert_close(told.balance, routing.balance.sum())
    torch.testing.assert_close(told.z, routing.z.sum())


def test_noise_belongs_to_a_step_a_layer_and_a_sequence():
    def noise(layer=0, **now):
        return LocalDispatch(DispatchContext(**({"sequences": (7, 2), "seed": 1, "step": 5} | now))).noise(layer, 16, 4)

    assert noise().shape == (2, 16, 4)
    assert torch.equal(noise(sequences=(2, 7)), noise()[[1, 0]])
    assert torch.equal(noise(sequences=(2,), batch_sequences=9), noise()[1:])
    for other in (noise(layer=1), noise(step=6), noise(seed=2), noise(sequences=(8, 3))):
        assert not (other == noise()).any()
    assert noise(step=None) is None


def test_bf16_routes_in_fp32():
    shape = shape_for(experts=8)
    block, exchange = block_of(shape, torch.bfloat16, **training([0]))
    x = torch.randn(1, 64, 32).bfloat16().requires_grad_()
    y = block(x, exchange=exchange)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    logits = block.gate(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(x.float(), block.gate.weight.float()), rtol=0, atol=0)


@ROUTER
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_gradient_of_a_whole_model_is_finite(router, tied):
    shape = shape_for(router, tied=tied, layers=2, shared_experts=1)
    decoder = Decoder(shape)
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        for spec, param in parameters(decoder, units(shape)).values():
            param.copy_(initial(spec, param.shape, 0))
    exchange = LocalDispatch(DispatchContext(**training([0, 1])))
    cross_entropy_sum(decoder(tokens, exchange=exchange), tokens).backward()
    for name, (_, param) in parameters(decoder, units(shape)).items():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name
        assert (param.grad != 0).any(), name


# ---------------------------------------------------------------- one parameter, many tensors


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.3.w2.weight"]),
        ({"qk_norm": True}, ["mlp.gate.weight", "mlp.experts.3.down_proj.weight"]),
        ({"router": "noisy-topk"}, ["mlp.gate.spread", "mlp.experts.3.down_proj.weight"]),
        ({"shared_experts": 1}, ["mlp.shared_experts.up_proj.weight", "mlp.experts.0.gate_proj.weight"]),
    ],
    ids=["mixtral", "qwen3_moe", "noisy", "shared"],
)
def test_experts_are_tensors_of_their_own_by_name(fields, names):
    shape = shape_for(**fields)
    with torch.device("meta"):
        decoder = Decoder(shape)
    tensors, specs = global_tensors(decoder, units(shape)), global_specs(units(shape))
    assert list(tensors) == list(specs)
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in decoder.parameters())
    assert {f"model.layers.1.{name}" for name in names} <= set(tensors)
    for name, tensor in tensors.items():
        assert len(specs[name].axes) == tensor.dim()
        assert specs[name].each == (specs[name],)


def test_the_tensors_of_a_stack_are_views_of_it():
    shape = shape_for()
    decoder = Decoder(shape)
    with torch.no_grad():
        global_tensors(decoder, units(shape))["model.layers.1.block_sparse_moe.experts.2.w3.weight"].fill_(7.0)
    weight = decoder.block[1].mlp.experts.up_proj.weight
    assert ((weight == 7.0).flatten(1).all(1)).tolist() == [False, False, True, False]


def test_each_tensor_of_a_stack_is_drawn_by_its_own_name():
    spec = units(shape_for())[1].params["mlp.experts.up_proj.weight"]
    stack = initial(spec, (4, 24, 32), 3)
    for one, values in zip(spec.each, stack, strict=True):
        assert one.axes == ("expert_ffn", "embed")
        assert torch.equal(initial(one, (24, 32), 3), values)
    assert len({one.name for one in spec.each}) == 4
    assert not torch.equal(stack[0], stack[1])


# ---------------------------------------------------------------- the reference


@ROUTER
def test_the_reference_trains_on_the_loss_that_is_written_down(router):
    """Row by row with losses in the backward pass, against one whole batch with the losses added."""
    shape = shape_for(router, layers=2, z_weight=0.05, balance_weight=0.3)
    train = TrainConfig(batch_sequences=small.SEQUENCES, steps=2, clip_norm=1e9)
    batch = small.batches(steps=1, packed=False)[0]
    step = next(reference_steps(shape, train, [batch]))

    losses = []
    exchange = LocalDispatch(DispatchContext(sequences=tuple(range(small.SEQUENCES)), seed=train.seed, step=0))
    decoder = Decoder(shape)
    with torch.no_grad():
        for spec, param in parameters(decoder, units(shape)).values():
            param.copy_(initial(spec, param.shape, train.seed))
    for block in decoder.block:
        block.mlp.moe = replace(shape.moe, balance_weight=0.0, z_weight=0.0)  # not here, but added below

        def routes(x, exchange, route=block.mlp.route):
            losses.append(route(x, exchange))
            return losses[-1]

        block.mlp.route = routes
    logits = decoder(batch.tokens_BS, exchange=exchange)
    loss = cross_entropy_sum(logits, batch.targets_BS) / batch.valid_tokens
    router_loss = sum(0.3 * r.balance.mean() + 0.05 * r.z.mean() for r in losses)
    (loss + router_loss).backward()
    assert len(losses) == 2
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(router_loss.detach()) > 0.1
    gradients = {n: g for spec, p in parameters(decoder, units(shape)).values() for n, g in spec.views(p.grad)}
    assert set(gradients) == set(step.gradients)
    for name, gradient in gradients.items():
        # fp32, and other orders of sums: as numerics.tolerance has it.
        assert (step.gradients[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-9, name
