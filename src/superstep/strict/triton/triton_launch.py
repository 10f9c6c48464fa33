"""Triton kernels on the strict device: its interpreter, run as a task of their stream.

Triton must interpret from its import on (see ``load``). By itself its interpreter makes the host wait, and copies all
arguments to it and back; then no launch would be asynchronous, and none could race with another stream's.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from superstep.strict.torch_cuda import launch_on_current
from superstep.strict.triton.triton_stores import parameter_use


def install(device: ModuleType) -> None:
    """Route launches with tensors of the device here.

    Args:
        device: the compiled module.
    """
    of_triton, turn = interpreter.GridExecutor.__call__, threading.Lock()

    def interpret(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        with turn:  # it changes Triton's language for all threads while a kernel runs
            of_triton(executor, *args, **kwargs)

    def launch(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        given = [*zip(executor.arg_names, args, strict=False), *kwargs.items()]
        tensors = [(name, one) for name, one in given if isinstance(one, torch.Tensor)]
        if not any(one.is_cuda for _, one in tensors):
            interpret(executor, *args, **kwargs)
            return
        stored = parameter_use(executor.fn).stored
        read = {name: one for name, one in tensors if name not in stored}
        written = {name: one for name, one in tensors if name in stored}
        others = {name: one for name, one in given if not isinstance(one, torch.Tensor)}
        kernel, line = executor.fn.__name__, device.caller()

        def run(read_views: list[torch.Tensor], written_views: list[torch.Tensor]) -> None:
            views = dict(zip([*read, *written], [*read_views, *written_views], strict=True))
            try:
                interpret(executor, **others, **views)
            except InterpreterError as error:
                raise RuntimeError(f"{kernel} ({line}): {error}") from error

        launch_on_current(device, [*read.values()], [*written.values()], run, kernel)

    interpreter.GridExecutor.__call__ = launch
