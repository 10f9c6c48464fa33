"""The strict device by itself: it computes what the CPU does, late, and refuses what a GPU would get wrong."""

import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from strict_ranks import SETTINGS, device_module
from superstep.strict.load import configure

pytestmark = pytest.mark.strict

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def device():
    module = device_module()
    configure(module, SETTINGS)
    torch.cuda.synchronize()
    module.take_races()
    module.take_host_waits()
    yield module
    torch.cuda.synchronize()
    module.take_races()


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


OPERATORS = {
    "matmul": lambda t: t @ t.t(),
    "cat": lambda t: torch.cat([t, t]),
    "index": lambda t: t[torch.tensor([1, 2], device=t.device)],
    "softmax": lambda t: t.softmax(-1),
    "topk": lambda t: t.topk(3).values,
    "sort": lambda t: t.sort(-1).values,
    "cumsum": lambda t: t.cumsum(0),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "masked_fill": lambda t: t.masked_fill(t > 0, 1.0),
    "transpose": lambda t: t.t().contiguous(),
    "bf16": lambda t: (t.bfloat16() @ t.bfloat16().t()).float(),
    "nonzero": lambda t: (t > 0).nonzero(),
    "foreach": lambda t: torch._foreach_add([t, t], 1.0)[1],
    "norm": torch.linalg.vector_norm,
    "rms_norm": lambda t: F.rms_norm(t, (16,)),
    "embedding": lambda t: F.embedding(torch.tensor([0, 3], device=t.device), t),
    "addmm into": lambda t: torch.addmm(t[:, :8], t, t.t(), out=torch.empty(8, 8, device=t.device)),
    "scatter_add": lambda t: t.scatter_add(0, torch.zeros(8, 16, dtype=torch.long, device=t.device), t),
    "index_put": lambda t: t.clone().index_put_((torch.tensor([0], device=t.device),), t[1:2]),
    "bincount": lambda t: torch.bincount((t[0] > 0).long()),
    "split": lambda t: t.split(4)[1] + 1,
    "expand": lambda t: t[:, None].expand(8, 3, 16).reshape(24, 16),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.zeros(8, dtype=torch.long, device=t.device)),
    "attention": lambda t: F.scaled_dot_product_attention(*[t.view(1, 2, 4, 16)] * 3, is_causal=True),
    "attention bf16": lambda t: F.scaled_dot_product_attention(*[t.view(1, 2, 4, 16).bfloat16()] * 3, is_causal=True),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_what_the_cpu_does(name, device):
    of_cpu, operator = numbers(8, 16), OPERATORS[name]
    got, wanted = operator(of_cpu.to(GPU)), operator(of_cpu)
    assert got.device == GPU
    tolerance = 2e-2 if "bf16" in name else 1e-5
    torch.testing.assert_close(got.cpu().float(), wanted.float(), atol=tolerance, rtol=tolerance)
    assert device.take_races() == []


def test_the_backward_pass_runs_in_a_thread_of_its_own_on_the_same_gpu():
    observed = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            observed.append((threading.current_thread() is threading.main_thread(), torch.cuda.current_device()))
            return grad * 2

    x = torch.ones(4, device="cuda:3", requires_grad=True)
    Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 4
    assert observed == [(False, 3)]


def test_two_uses_that_nothing_orders_are_an_error_with_both_lines():
    other, x = torch.cuda.Stream(), torch.ones(1000, device=GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.mul_(2)
    with pytest.raises(
        RuntimeError,
        match=r"race: aten::add.*test_strict_device.py:\d+.*reads.*aten::mul.*test_strict_device.py:\d+.*writes",
    ):
        x + 1


@pytest.mark.parametrize("order", ["event", "stream", "host"])
def test_what_is_ordered_is_no_race(order, device):
    other, x = torch.cuda.Stream(), torch.ones(1000, device=GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.mul_(2)
    match order:
        case "event":
            torch.cuda.current_stream().wait_event(other.record_event())
        case "stream":
            torch.cuda.current_stream().wait_stream(other)
        case "host":
            other.synchronize()
    assert (x + 1)[0].item() == 3
    assert device.take_races() == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_another_stream_still_uses_is_recorded_there_or_named(is_recorded, device):
    other, x = torch.cuda.Stream(), torch.ones(5000, device=GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x * 2
    if is_recorded:
        x.record_stream(other)
    del x
    races = device.take_races()
    if is_recorded:
        assert races == []
    else:
        assert len(races) == 1
        assert re.search(r"is freed \(.*test_strict_device.py:\d+.*\) while aten::mul", races[0])
        assert "record_stream" in races[0]
    del y


def test_what_was_freed_is_poisoned():
    x = torch.ones(5000, device=GPU)
    torch.cuda.synchronize()
    del x
    assert torch.empty(5000, device=GPU).isnan().all().item()


def test_what_was_freed_once_another_stream_had_used_it_is_poisoned_too():
    other, x = torch.cuda.Stream(), torch.ones(7000, device=GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x + 1
    x.record_stream(other)
    address = x.data_ptr()
    del x
    torch.cuda.synchronize()
    again = torch.empty(7000, device=GPU)
    assert again.data_ptr() == address
    assert again.isnan().all().item()


def test_events_are_no_launches(device):
    before = device.launches()
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    assert device.launches() == before


def test_storages_are_resized_as_zero_does_it():
    x = torch.arange(100.0, device=GPU)
    storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    assert x.fill_(3).sum().item() == 300


def test_memory_ends_where_the_settings_say():
    before = torch.cuda.memory_allocated()
    held = torch.empty(1 << 29, dtype=torch.uint8, device=GPU)
    assert torch.cuda.memory_allocated() - before == 1 << 29
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        torch.empty((1 << 29) + 1, dtype=torch.uint8, device=GPU)
    del held
    torch.empty((1 << 29) + 1, dtype=torch.uint8, device=GPU)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(4, device=GPU) + torch.ones(4, device=other)


def test_a_thread_begins_on_the_first_gpu_and_its_context_is_counted(device):
    torch.cuda.set_device(2)
    try:
        torch.ones(1, device="cuda:2")
        before = device.contexts()
        thread = threading.Thread(target=lambda: torch.ones(1, device="cuda"))
        thread.start()
        thread.join()
        assert device.contexts() - before <= {0}
        assert 0 in device.contexts()
    finally:
        torch.cuda.set_device(0)


def test_waits_of_the_host_are_counted_by_operator_and_line(device):
    x = torch.ones(4, device=GPU)
    assert device.take_host_waits() == {}
    x.sum().item()
    (waits,) = device.take_host_waits().items()
    assert waits[0].startswith("item (")
    assert "test_strict_device.py:" in waits[0]
    assert waits[1] == 1
    torch.ones(4).to(GPU)
    assert [where[:19] for where in device.take_host_waits()] == ["copy_ to the device"]
    torch.ones(4).pin_memory().to(GPU, non_blocking=True)
    assert device.take_host_waits() == {}


def test_events_tell_time_once_they_are_over():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x = torch.ones(64, 64, device=GPU)
    x @ x
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0


def test_the_latest_order_runs_nothing_before_the_host_waits(device):
    configure(device, replace(SETTINGS, order="latest"))
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_takes_sixteen_bits_only(dtype):
    q = numbers(1, 2, 16, 8).to(GPU, dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    if dtype == torch.bfloat16:
        assert flash(q, q, q, 0.0, True)[0].shape == q.shape
        return
    with pytest.raises(RuntimeError, match="FlashAttention only support fp16 and bf16"):
        flash(q, q, q, 0.0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_keeps_its_input_and_one_number_of_each_row(dtype):
    kept, grads = [], []
    for place in ("cpu", GPU):
        x, weight = (numbers(*shape).to(dtype).to(place).requires_grad_() for shape in ((8, 16), (16,)))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            kept.clear()
            out = F.rms_norm(x, (16,), weight)
        grads.append([out, *torch.autograd.grad(out, (x, weight), numbers(8, 16).to(dtype).to(place))])
    assert sorted(kept) == [(8, 1), (8, 16), (16,)]
    for of_cpu, of_gpu in zip(*grads, strict=True):
        torch.testing.assert_close(of_gpu.cpu().float(), of_cpu.float(), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "keys", "kernel"),
    [
        (torch.bfloat16, 1, "_scaled_dot_product_flash_attention"),
        (torch.float32, 2, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 1, "bmm"),
    ],
)
def test_attention_is_that_which_a_gpu_chooses(dtype, keys, kernel):
    q, kv = numbers(1, 2, 16, 8).to(GPU, dtype), numbers(1, keys, 16, 8).to(GPU, dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=keys == 1)
    assert f"aten::{kernel}" in {event.name for event in profile.events()}


def test_flash_attention_of_many_sequences_is_that_of_each():
    q, starts = numbers(10, 2, 8).to(GPU, torch.bfloat16), torch.tensor([0, 4, 10], dtype=torch.int32, device=GPU)
    aten = torch.ops.aten
    out, lse, *_ = aten._flash_attention_forward(q, q, q, starts, starts, 6, 6, 0.0, True, False)
    seed = torch.zeros((), dtype=torch.int64, device=GPU)
    back = aten._flash_attention_backward(q, q, q, q, out, lse, starts, starts, 6, 6, 0.0, True, seed, seed)
    leaf = q.cpu().float().requires_grad_()
    heads = [x.transpose(0, 1)[None] for x in leaf.split((4, 6))]
    whole = torch.cat([F.scaled_dot_product_attention(x, x, x, is_causal=True)[0].transpose(0, 1) for x in heads])
    (wanted,) = torch.autograd.grad(whole, leaf, q.cpu().float())
    torch.testing.assert_close(out.cpu().float(), whole.detach(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(sum(x.cpu().float() for x in back), wanted, atol=4e-2, rtol=4e-2)


def run_alone(code):
    """The code in a process of its own, on the strict device: its exit status, stdout and stderr."""
    begin = "from superstep.strict.load import load; from superstep.strict.settings import Settings; load(Settings())\n"
    program = begin + "import ctypes, os, torch\nd = 'cuda'\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_the_host_cannot_touch_the_devices_memory():
    done = run_alone("x = torch.ones(10, device=d); torch.cuda.synchronize()\nctypes.string_at(x.data_ptr(), 4)")
    assert done.returncode == -11
    assert "strict device: the host touched memory of cuda:0" in done.stderr
    assert "<string>" in done.stderr, "the line that touched it"


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_pinned_memory_is_shut_until_the_host_has_waited_for_the_copy(is_waited_for):
    wait = "torch.cuda.current_stream().synchronize()" if is_waited_for else ""
    done = run_alone(
        f"""
        p = torch.empty(1000, pin_memory=True); x = torch.ones(1000, device=d)
        p.copy_(x, non_blocking=True)
        {wait}
        print(p.sum().item())
        """
    )
    if is_waited_for:
        assert done.stdout == "1000.0\n", done.stderr
    else:
        assert done.returncode == -11
        assert "pinned memory that a copy still uses" in done.stderr


def test_pinned_memory_that_is_written_before_its_copy_is_over_is_named():
    done = run_alone("p = torch.ones(1000).pin_memory()\nx = p.to(d, non_blocking=True)\np.fill_(2)")
    assert done.returncode == -11
    assert "pinned memory that a copy still uses" in done.stderr


@pytest.mark.parametrize("written", [0, 1])
def test_one_half_of_a_pinned_buffer_is_open_while_the_other_one_is_copied(written):
    done = run_alone(
        f"""
        x = torch.ones(5000, device=d); halves = torch.zeros(2, 5000, pin_memory=True)
        halves[1].copy_(x, non_blocking=True)
        halves[{written}, 1000:3000].fill_(3)
        torch.cuda.synchronize()
        print(halves.sum().item())
        """
    )
    if written == 0:
        assert done.stdout == "11000.0\n", done.stderr
    else:
        assert done.returncode == -11
        assert "pinned memory that a copy still uses" in done.stderr


def test_a_fork_of_a_process_that_has_used_the_device_may_not():
    done = run_alone(
        """
        x = torch.ones(10, device=d)
        if os.fork() == 0:
            torch.manual_seed(3)  # as a loader's workers do
            try:
                x + 1
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert "Cannot re-initialize CUDA in forked subprocess" in done.stdout, done.stderr


def test_a_fork_finds_no_lock_of_the_device_shut():
    """A thread of the parent takes it all the time: a kernel ends, the next one begins."""
    done = run_alone(
        """
        import signal
        x, side = torch.ones(10, device=d), torch.cuda.Stream()
        for n in range(100):
            for _ in range(200):
                x.add_(1)
            if os.fork() == 0:
                signal.alarm(10)
                x.record_stream(side)
                try:
                    x + 1
                except RuntimeError as error:
                    os._exit("Cannot re-initialize CUDA in forked subprocess" not in str(error))
                os._exit(2)
            assert os.wait()[1] == 0, n
        torch.cuda.synchronize()
        print(x[0].item())
        """
    )
    assert done.stdout == "20001.0\n", done.stderr


def test_it_is_loaded_before_torch_or_not_at_all():
    done = run_alone("load(Settings())")
    assert done.returncode == 1
    assert "torch is imported already" in done.stderr


def test_a_seed_gives_its_order_again(device):
    """Of tasks that are all there before the first one runs."""

    def order(seed):
        torch.cuda.synchronize()
        configure(device, replace(SETTINGS, seed=seed))
        start, ends, are_there = torch.cuda.Event(enable_timing=True), [], threading.Event()
        device.launch(0, [], [], lambda *_: are_there.wait(60), "nothing runs before all are there")
        start.record()
        for stream in streams:
            stream.wait_event(start)
            ends += [stream.record_event(torch.cuda.Event(enable_timing=True)) for _ in range(4)]
        are_there.set()
        torch.cuda.synchronize()
        return sorted(range(len(ends)), key=lambda number: start.elapsed_time(ends[number]))

    streams = [torch.cuda.Stream() for _ in range(4)]
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_to_choose_a_gpu_makes_a_context_there(device):
    try:
        torch.cuda.set_device(5)
        assert 5 in device.contexts()
        assert re.search(r"test_strict_device.py:\d+", device.context_lines()[5])
    finally:
        torch.cuda.set_device(0)


def test_numbers_are_drawn_by_the_seed_of_their_gpu_whenever_they_run(device):
    configure(device, replace(SETTINGS, order="latest"))
    torch.manual_seed(3)
    drawn, of_host = torch.randn(4, device=GPU), torch.randn(2)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(2), of_host), "what a GPU draws is not the host's"
    assert torch.equal(torch.randn(4, device=GPU).cpu(), drawn.cpu())
    state = torch.cuda.get_rng_state()
    order = torch.randperm(9, device=GPU)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randperm(9, device=GPU).cpu(), order.cpu())
    assert not torch.equal(torch.randn(9, device=GPU).cpu(), torch.randn(9, device=GPU).cpu())


def test_dropout_has_the_same_mask_when_it_is_computed_again(device):
    x = torch.ones(1000, device=GPU, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.25) * x, x, use_reentrant=False)
    F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal((x.grad != 0).cpu(), (y != 0).cpu())
    assert 0.7 < (y != 0).float().mean().item() < 0.8


def test_results_whose_shape_follows_from_values_are_written_on_the_stream(device):
    x, side = torch.tensor([0.0, 1.0, 2.0], device=GPU), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = x.nonzero()
    with pytest.raises(RuntimeError, match=r"race: aten::add.*reads.*aten::nonzero.*writes"):
        found + 1
    torch.cuda.synchronize()
    out = torch.empty(0, dtype=torch.int64, device=GPU)
    torch.nonzero(x, out=out)
    assert out.tolist() == [[1], [2]]


def test_indices_of_the_hosts_are_taken_and_waited_for(device):
    x = torch.arange(5.0, device=GPU)
    torch.cuda.synchronize()
    device.take_host_waits()
    assert x[torch.tensor([1, 2])].tolist() == [1.0, 2.0]
    x[torch.tensor([0])] = 7.0
    waits = [wait.split(" ")[0] for wait in device.take_host_waits()]
    assert "aten::index.Tensor_out" in waits
    assert x.tolist() == [7.0, 1.0, 2.0, 3.0, 4.0]


def test_complex_numbers_are_views(device):
    x = torch.randn(3, 2, device=GPU)
    turned = torch.view_as_real(torch.view_as_complex(x) * 1j)
    torch.testing.assert_close(turned.cpu(), torch.stack([-x[:, 1], x[:, 0]], 1).cpu())
