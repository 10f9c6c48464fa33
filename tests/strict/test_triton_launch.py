"""Our kernels in Triton on emulated GPUs: the interpreter's numbers, late, and no use of memory that nothing orders."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.strict,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

BEGIN = """
from superstep.strict.load import load
from superstep.strict.settings import Settings
load(Settings(order="latest"))
import strict_device, torch
from superstep.strict.triton_launch import install
install(strict_device)
from superstep.kernels.gpu.softmax import softmax
from superstep.kernels.gpu.matmul import matmul
from superstep.kernels.gpu.norm import rms_norm
from superstep.kernels.gpu.swiglu import swiglu
x, w, gpu = torch.randn(5, 32), torch.randn(32), torch.device("cuda", 0)
on_gpu = x.to(gpu), w.to(gpu)
"""


def run_interpreted(code):
    """The code in a process of its own, as Triton asks once whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    program = BEGIN + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_kernels_compute_late_what_the_interpreter_does():
    done = run_interpreted(
        """
        calls = {
            "softmax": lambda x, w: softmax(x),
            "matmul": lambda x, w: matmul(x, x.t()),
            "norm": lambda x, w: rms_norm(x, w, 1e-5),
            "swiglu": lambda x, w: swiglu(x, x * 2),
        }
        strict_device.take_host_waits()
        late = {name: call(*on_gpu) for name, call in calls.items()}
        assert strict_device.take_host_waits() == {}, "no launch waits"
        for name, call in calls.items():
            assert torch.equal(late[name].cpu(), call(x, w)), name
        leaf = on_gpu[1].clone().requires_grad_()
        rms_norm(on_gpu[0], leaf, 1e-5).sum().backward()
        of_cpu = w.clone().requires_grad_()
        rms_norm(x, of_cpu, 1e-5).sum().backward()
        assert torch.equal(leaf.grad.cpu(), of_cpu.grad)
        assert strict_device.take_races() == []
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_launch_beside_another_use_of_its_memory_is_named(is_ordered):
    wait = "torch.cuda.current_stream().wait_stream(other)" if is_ordered else ""
    done = run_interpreted(
        f"""
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            on_gpu[0].mul_(2)
        {wait}
        softmax(on_gpu[0]).cpu()
        print("done")
        """
    )
    if is_ordered:
        assert done.stdout == "done\n", done.stderr
    else:
        assert "race: _softmax (superstep/kernels/gpu/softmax.py:" in done.stderr
        assert "and no event orders the two" in done.stderr
