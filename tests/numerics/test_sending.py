"""What is sent to a device is what the host had."""

import pytest
import torch

from superstep.numerics.sending import send


@pytest.mark.parametrize("shape", [(3, 4), (0,), ()])
def test_the_device_has_the_hosts_numbers(shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert torch.equal(send(values, torch.device("cpu")), values)
