"""What users' models call of torch works on an emulated GPU as on the CPU, or is refused by its name."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strict_ranks import device_module

pytestmark = pytest.mark.strict

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(place, count=6):
    return torch.arange(2 * count, device=place).view(2, count) % 5


def ctc_loss(x, lengths_on):
    lengths = torch.tensor([5, 4], device=lengths_on)
    return F.ctc_loss(x.log_softmax(-1), tokens(x.device, 3) % 3 + 1, lengths, lengths - 3)


LAYERS = {
    "LSTM": ((3, 2, 4), lambda: nn.LSTM(4, 5, 2, bidirectional=True), lambda net, x: net(x)[0]),
    "LSTM of sequences": (
        (3, 4), lambda: nn.LSTM(4, 5), lambda net, x: net(nn.utils.rnn.pack_sequence([x, x[:2]]))[0].data),
    "cell of LSTM": ((3, 4), lambda: nn.LSTMCell(4, 5, bias=False), lambda net, x: net(x)[1]),
    "GRU": ((3, 2, 4), lambda: nn.GRU(4, 5), lambda net, x: net(x)[0]),
    "RNN": ((3, 2, 4), lambda: nn.RNN(4, 5), lambda net, x: net(x)[0]),
    "bags by their means": ((1,), lambda: nn.EmbeddingBag(5, 4), lambda net, x: net(tokens(x.device)) * x),
    "bags by their sums": ((1,), lambda: nn.EmbeddingBag(5, 4, mode="sum"), lambda net, x: net(tokens(x.device)) * x),
    "bags by their largest": (
        (1,), lambda: nn.EmbeddingBag(5, 4, mode="max"), lambda net, x: net(tokens(x.device)) * x),
    "convolution of each channel": ((2, 4, 9), lambda: nn.Conv1d(4, 4, 3, groups=4), lambda net, x: net(x)),
    "convolution, transposed": ((2, 4, 5, 5), lambda: nn.ConvTranspose2d(4, 6, 3, 2), lambda net, x: net(x)),
    "convolution": ((2, 4, 5, 5), lambda: nn.Conv2d(4, 6, 3, bias=False), lambda net, x: net(x)),
    "CTC": ((5, 2, 6), nn.Identity, lambda net, x: ctc_loss(net(x), "cpu")),
    "CTC, lengths on the GPU": ((5, 2, 6), nn.Identity, lambda net, x: ctc_loss(net(x), x.device)),
    "a bias that is learnt": (
        (2, 2, 8, 8), lambda: nn.Embedding(8, 8), lambda net, x: F.scaled_dot_product_attention(x, x, x, net.weight)),
    "attention": (
        (2, 8, 8), lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda net, x: net(x, x, x)[0]),
}  # fmt: skip


def results(name, place):
    """The output of a layer, and the gradients of its input and its parameters."""
    shape, make, call = LAYERS[name]
    torch.manual_seed(0)
    net, x = make().to(place), drawn(*shape).to(place).requires_grad_()
    out = call(net, x)
    return [out.detach(), *torch.autograd.grad((out * out).sum(), [x, *net.parameters()])]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_the_cpu_does(name):
    for mine, cpus in zip(results(name, GPU), results(name, "cpu"), strict=True):
        torch.testing.assert_close(mine.cpu(), cpus, rtol=1e-4, atol=1e-5)


WIDE = {
    "mm": lambda x, y, total, how: torch.mm(x[0], y[0], **how),
    "bmm": lambda x, y, total, how: torch.bmm(x, y, **how),
    "addmm": lambda x, y, total, how: torch.addmm(total[0], x[0], y[0], beta=2, alpha=3, **how),
    "baddbmm": lambda x, y, total, how: torch.baddbmm(total, x, y, beta=2, alpha=3, **how),
}


@pytest.mark.parametrize("name", WIDE)
def test_products_of_sixteen_bits_are_written_in_fp32(name):
    x, y, total = (drawn(2, 4, 4, dtype=BF16, seed=seed) for seed in range(3))
    found = WIDE[name](x.to(GPU), y.to(GPU), total.float().to(GPU), {"out_dtype": torch.float32})
    wanted = WIDE[name](x.float(), y.float(), total.float(), {})
    torch.testing.assert_close(found.cpu(), wanted)


DROPPING = {
    "flash": (BF16, None, SDPBackend.FLASH_ATTENTION),
    "efficient": (torch.float32, None, SDPBackend.EFFICIENT_ATTENTION),
    "efficient with a mask": (torch.float32, torch.ones(48, 48).tril().bool(), SDPBackend.EFFICIENT_ATTENTION),
}


@pytest.mark.parametrize("name", DROPPING)
def test_attention_drops_by_the_seed_of_the_gpu(name):
    """Of values that are one, an output is the sum of the weights that are kept, and so the gradient of each value."""
    dtype, mask, kernel = DROPPING[name]
    q, ones = drawn(1, 2, 48, 8, dtype=dtype).to(GPU), torch.ones(1, 2, 48, 8, dtype=dtype, device=GPU)

    def attend(values):
        given = None if mask is None else mask.to(GPU)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, q, values, given, dropout_p=0.25)

    torch.manual_seed(1)
    values = ones.clone().requires_grad_()
    first, second = attend(values), attend(ones)
    torch.manual_seed(1)
    assert torch.equal(attend(ones).cpu(), first.cpu())
    assert not torch.equal(second.cpu(), first.cpu())
    assert first.float().mean().item() == pytest.approx(1, abs=0.1)
    assert first.float().std().item() > 0.01
    (grad,) = torch.autograd.grad(first, values, torch.ones_like(first))
    assert grad.float().sum().item() == pytest.approx(first.float().sum().item(), rel=1e-2)


def test_many_sequences_drop_what_their_gradients_do():
    q, ones = drawn(10, 2, 8, dtype=BF16).to(GPU), torch.ones(10, 2, 8, dtype=BF16, device=GPU)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32, device=GPU)
    given = starts, starts, 6, 6, 0.5, False
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(q, q, ones, *given, False)
    back = torch.ops.aten._flash_attention_backward
    grad = back(torch.ones_like(out), q, q, ones, out, lse, *given, seed, offset)[2]
    assert out.float().std().item() > 0.1
    assert grad.float().sum().item() == pytest.approx(out.float().sum().item(), rel=1e-2)


def attended(dtype, *kernels, **how):
    q = drawn(1, 2, 4, 8, dtype=dtype).to(GPU)
    with sdpa_kernel(list(kernels), **how):
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(("dtype", "kernel"), [
    (torch.float32, SDPBackend.FLASH_ATTENTION), (BF16, SDPBackend.CUDNN_ATTENTION)])  # fmt: skip
def test_attention_that_no_chosen_kernel_takes_is_refused(dtype, kernel):
    with pytest.raises(RuntimeError, match="No available kernel"):
        attended(dtype, kernel)


def test_kernels_of_attention_are_tried_in_the_order_that_is_given():
    device = device_module()
    device.record(True)
    attended(BF16, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, set_priority=True)
    attended(BF16, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, set_priority=True)
    torch.cuda.synchronize()
    device.record(False)
    called = [event[2].split(" ")[0] for event in device.take_trace() if "_attention" in event[2]]
    assert [name.split("_")[4] for name in called] == ["efficient", "flash"]


REFUSED = {
    "sparse tensors": lambda: torch.eye(4, device=GPU).to_sparse(),
    "a sparse gradient": lambda: nn.Embedding(5, 4, sparse=True).to(GPU)(tokens(GPU)).sum().backward(),
    "a kernel that only CUDA has": lambda: torch.ops.aten._cudnn_init_dropout_state(
        0.1, True, 0, dtype=torch.uint8, device=GPU),
    "CUDA graphs": torch.cuda.CUDAGraph,
    "a graph": lambda: torch.cuda.graph(None).__enter__(),
    "cuBLAS": torch.cuda.current_blas_handle,
    "a pool": torch.cuda.MemPool,
    "several GPUs from one thread": lambda: nn.DataParallel(nn.Linear(4, 4).to(GPU))(drawn(8, 4).to(GPU)),
    "a share": lambda: torch.cuda.set_per_process_memory_fraction(0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_in_a_line(name):
    with pytest.raises(NotImplementedError, match=r"^\S+: the emulated GPU has no .*$"):
        REFUSED[name]()


def test_compiled_models_are_refused_by_name():
    with pytest.raises(RuntimeError, match=r"torch\.compile: the emulated GPU runs no compiled kernels"):
        torch.compile(lambda x: x + 1)(drawn(4).to(GPU))


CALLS = {
    "caching_allocator_disabled", "can_device_access_peer", "check_error", "manual_seed", "manual_seed_all",
    "set_device", "set_rng_state", "set_rng_state_all", "set_stream",
}  # fmt: skip
"""Functions of ``torch.cuda`` that take arguments, or are contexts. All but these are called below."""


def functions():
    for name in torch.cuda.__all__:
        value = getattr(torch.cuda, name, None)
        if inspect.isroutine(value) and name not in CALLS:
            yield name, value


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_function_of_torch_works():
    torch.ones(1, device=GPU)
    generators = torch.cuda.get_rng_state_all()
    found = {name: function() for name, function in functions()}
    torch.cuda.set_rng_state_all(generators)
    assert len(found) > 30
    assert found["is_available"]
    assert not set(found) & {"memory_snapshot", "utilization"}, "these are refused"


def test_memory_is_told_as_cudas_allocator_tells_it():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=GPU)
    torch.empty(3 << 20, dtype=torch.uint8, device=GPU)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device=GPU)
    after = torch.cuda.memory_stats()
    grown = {key: after[key] - before[key] for key in before if after[key] != before[key]}
    assert grown["allocated_bytes.all.current"] == len(held)
    assert grown["allocated_bytes.all.peak"] == grown["active_bytes.all.peak"] == 4 << 20
    assert (grown["allocation.all.allocated"], grown["allocation.all.freed"]) == (2, 1)
    assert (grown["num_ooms"], grown["num_alloc_retries"]) == (1, 1)
    assert torch.cuda.max_memory_reserved() == before["reserved_bytes.all.current"] + (4 << 20)
    assert "Allocated memory" in torch.cuda.memory_summary()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_events_devices_and_streams_are_classes():
    class Mark(torch.cuda.Event):
        pass

    begin, end = Mark(enable_timing=True), torch.cuda.current_stream().record_event(Mark(enable_timing=True))
    begin.record()
    begin.wait(torch.cuda.Stream())
    torch.cuda.synchronize()
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(torch.cuda.current_stream().record_event(), torch.cuda.Event)
    assert end.elapsed_time(begin) > 0
    for wrong, why in ((torch.cuda.Event(), "enable_timing"), (Mark(enable_timing=True), "must be recorded")):
        with pytest.raises(ValueError, match=why):
            begin.elapsed_time(wrong)
    with torch.cuda.device(1) as _, torch.cuda.device(-1):
        assert torch.cuda.current_device() == 1
    with torch.cuda.device_of(torch.empty(1, device="cuda:2")):
        assert torch.cuda.current_device() == 2
    assert torch.cuda.current_device() == 0
    assert isinstance(torch.cuda.device(0), torch.cuda.device)
    assert isinstance(torch.cuda.stream(None), torch.cuda.StreamContext)
    with torch.cuda.nvtx.range("a part"):
        torch.cuda.nvtx.mark("here")
