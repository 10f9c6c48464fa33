"""Exact mode's kernels on the emulated GPU: torch's of the CPU, in the place of ``kernels.gpu.invariant``.

Triton's interpreter would take milliseconds for a tile, and its products have bits that depend on the memory layout.
"""

from superstep.kernels.invariant import torch_product as product
from superstep.kernels.invariant import torch_row_norm as row_norm
from superstep.kernels.invariant import torch_row_sum as row_sum

__all__ = ["product", "row_norm", "row_sum"]
