"""Modules without values: shapes on the meta device, and no random draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWN = (nn.init.normal_, nn.init.xavier_normal_, nn.init.kaiming_normal_, Tensor.normal_)


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules within the block on the meta device."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Skips random initialisation, for which torch needs its compiler on the meta device: a millisecond for each
    tensor, and a second for the first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func in DRAWN and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)
