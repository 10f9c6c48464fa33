"""Memory of the host that CUDA is told of (``cudaHostRegister``): pinned on an emulated GPU from then on."""

import re
from dataclasses import replace

import pytest
import torch

from strict_ranks import SETTINGS, begin_nccl, device_module, run_to_the_end
from superstep.strict.load import configure

pytestmark = pytest.mark.strict


@pytest.fixture
def races_are_noted():
    configure(device_module(), replace(SETTINGS, raises=False))
    yield
    configure(device_module(), SETTINGS)


def copy_to_registered(kind):
    """Memory that the host has made, registered; and what the waits of a copy to it are, which does not block."""
    memory = torch.zeros(1 << 16).share_memory_() if kind == "shared" else torch.zeros(1 << 16)
    assert torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    torch.cuda.synchronize()
    device_module().take_host_waits()
    memory.copy_(torch.ones(1 << 16, device="cuda"), non_blocking=True)
    return memory, device_module().take_host_waits()


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_that_is_registered_is_pinned(races_are_noted, kind):
    memory, waits = copy_to_registered(kind)
    assert (memory.is_pinned(), waits) == (True, {})
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        memory.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    (race,) = device_module().take_races()
    assert re.search(
        r"copy_ to the device \(\S*test_registered_memory.py.* that copy_ to the host \(\S*test_registered", race
    )
    assert memory[:2].tolist() == [1, 1]
    assert torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()) == 0
    assert (memory.is_pinned(), device_module().take_races()) == (False, [])
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    memory.copy_(torch.ones(1 << 16, device="cuda"), non_blocking=True)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # while it is copied to
    (race,) = device_module().take_races()
    assert re.search(r"registered memory is given back \(.*\) while copy_ to the host \(.*\) writes on", race)
    torch.cuda.synchronize()


def read_registered_at_once(rank, world, folder):
    begin_nccl(rank, world, folder, 60)
    memory, _ = copy_to_registered("shared")
    memory[0].item()  # while it is copied to


def test_the_host_does_not_read_registered_memory_that_others_can_share_before_its_copy_is_over(tmp_path):
    ((status, text),) = run_to_the_end(1, read_registered_at_once, tmp_path)
    assert status == -11
    line = r'File ".*registered_memory.py", line \d+ in read_registered_at_once'
    assert re.search(rf"pinned memory that a copy still uses\n(?s:.*){line}", text)
