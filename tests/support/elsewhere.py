"""A device that computes nothing and lets nothing be mixed with it: what runs here runs on a GPU without the CPU.

The meta device stands for it. Its own rules are laxer than a GPU's kernels are (torch._fused_adamw_ takes step counts
on any device there), so every operation's tensors are looked at as they pass. Numbers that are read back are nought.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superstep.runtime.device import Device

MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
"""What brings values from the CPU, and may."""


class Elsewhere(Device):
    """A GPU as far as the code under test can see."""

    @property
    def torch(self):
        return torch.device("meta")

    def synchronize(self):
        pass


class Strict(TorchDispatchMode):
    """Refuses an operation with a tensor on another device, as a GPU's kernels do; scalars may come along pointwise.

    Attributes:
        operations: names of those that passed.
        strangers: operations on the CPU alone: legal, but whoever uses them must mean it.
        reads: numbers read back, for which a GPU is waited for; here they are all nought.
        waits: copies to the GPU for which it is waited.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self.strangers = []
        self.reads = 0
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        kinds = {t.device.type for t in tensors}
        if len(kinds) > 1 and func not in MOVES:
            scalars = torch.Tag.pointwise in func.tags and all(t.ndim == 0 for t in tensors if t.device.type == "cpu")
            assert scalars, f"{func} is given tensors on {sorted(kinds)}: {[tuple(t.shape) for t in tensors]}"
        if func is torch.ops.aten._local_scalar_dense.default and kinds == {"meta"}:
            self.reads += 1
            return 0.0
        out = func(*args, **(kwargs or {}))
        if func in MOVES and kinds == {"cpu"} and out.device.type == "meta" and not (kwargs or {}).get("non_blocking"):
            self.waits.append(tuple(out.shape))
        self.operations.append(str(func))
        if "cpu" in {t.device.type for t in tree_leaves(out) if isinstance(t, torch.Tensor)}:
            self.strangers.append(str(func))
        return out
