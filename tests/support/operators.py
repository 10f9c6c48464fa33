"""Which operators torch is asked for, and which of them compute on the host."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCORES = {"aten._softmax.default", "aten._safe_softmax.default"}
"""Of scores that are made whole: a fused kernel has them in pieces."""


class Operators(TorchDispatchMode):
    """Within the block, those that are called, backward passes and their threads included.

    Attributes:
        called: their names, in order.
        on_host: names of those that give a tensor of the host's.
        largest: how many numbers the largest tensor has that is made.
    """

    def __init__(self):
        super().__init__()
        self.called, self.on_host, self.largest = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.called.append(str(func))
        if any(x.device.type == "cpu" for x in made):
            self.on_host.append(str(func))
        self.largest = max(self.largest, *(x.numel() for x in made), 0)
        return out
