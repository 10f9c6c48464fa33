"""Random words and dropout by Triton: the bits of torch."""

import pytest
import torch

from superstep.kernels.gpu import philox
from superstep.kernels.philox import WORDS, Counter, reference, reference_drop

COUNTER = Counter(key=0xA4093822299F31D0, step=7, sample=3)
FIRSTS = torch.tensor([0, 5, 2**34 + 3, 1000])


@pytest.mark.parametrize("width", [1, 70, 1500])
def test_words(device, width):
    found = philox.random_words(COUNTER, FIRSTS.to(device), 2, width).cpu()
    assert torch.equal(found.long() % WORDS, reference(COUNTER, FIRSTS, 2, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "spread"), [(1, 1), (1500, 1), (1, 300), (21, 7)])
def test_dropout(device, dtype, width, spread):
    # A quarter of its digits is left: the interpreter cuts bf16 off where a GPU rounds.
    x = torch.randint(-8, 8, (2, 4, width * spread), generator=torch.Generator().manual_seed(0)).to(dtype)
    threshold = WORDS // 2
    found = philox.drop(x.to(device), COUNTER, FIRSTS.to(device), (2, 4, width), spread, threshold, 2.0)
    assert torch.equal(found.cpu(), reference_drop(x, COUNTER, FIRSTS, threshold, spread=spread))
