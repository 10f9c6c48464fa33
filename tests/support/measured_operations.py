"""One of each kind of operation that a run measures."""

from superstep.cost.program.time.operation import AttentionOperation, MatmulOperation, MemoryOperation
from superstep.engine.measure.probe_kernels import PASSES

OPERATIONS = [
    MatmulOperation(rows=8, width=16, inner=8),
    AttentionOperation(heads=2, queries=8, keys=8, head_dim=8),
    AttentionOperation(heads=2, queries=8, keys=8, head_dim=8, is_backward=True),
    AttentionOperation(heads=2, queries=8, keys=16, head_dim=8),
    *(MemoryOperation(kernel=kernel, bytes=0) for kernel in PASSES),
]
