"""Kernels in Triton on the strict device: its interpreter, run as a task of the stream that they are launched on.

Triton must interpret (TRITON_INTERPRET=1 when it is imported). By itself its interpreter has the host wait, and copies
all arguments to it and back; so no launch would be late, and none could meet another stream's.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
from triton.runtime import interpreter

from superstep.strict.torch_cuda import launch_on_current


def install(device: ModuleType) -> None:
    """Launch what has tensors of the device so.

    What a kernel writes is not known before it runs: each of its tensors counts as written.

    Args:
        device: the compiled module.
    """
    of_triton, turn = interpreter.GridExecutor.__call__, threading.Lock()

    def interpret(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        with turn:  # it changes Triton's language for all threads while a kernel runs
            of_triton(executor, *args, **kwargs)

    def launch(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        given = [*args, *kwargs.values()]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if not any(one.is_cuda for one in tensors):
            interpret(executor, *args, **kwargs)
            return

        def run(_: list[torch.Tensor], views: list[torch.Tensor]) -> None:
            remaining = iter(views)
            replaced = [next(remaining) if isinstance(one, torch.Tensor) else one for one in given]
            interpret(executor, *replaced[: len(args)], **dict(zip(kwargs, replaced[len(args) :], strict=True)))

        launch_on_current(device, [], tensors, run, executor.fn.__name__)

    interpreter.GridExecutor.__call__ = launch
