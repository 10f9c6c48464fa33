"""GPUs that compute nothing, as the runtime of CUDA has them: which of them this process has a context on.

A thread's current GPU is 0 until it sets another one, an error stays with the thread that met it, and whatever a thread
asks gives the process a context on the GPU that is current, or that it makes current.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import torch


class ManyGpus:
    """Stands for torch.cuda where it is put.

    Attributes:
        contexts: numbers of the GPUs that this process has one on.
        register_code: what cudaHostRegister returns.
        registered: addresses and sizes.
    """

    def __init__(self, monkeypatch, register_code=0):
        self.contexts, self.registered = set(), []
        self.register_code = register_code
        self._local = threading.local()
        for name in ("set_device", "Stream", "stream", "current_stream", "cudart", "CudaError"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    @property
    def current(self):
        return getattr(self._local, "current", 0)

    @property
    def last_error(self):
        """Of this thread."""
        return getattr(self._local, "error", 0)

    def set_device(self, device):
        self._local.current = torch.device(device).index if not isinstance(device, int) else device
        self.contexts.add(self.current)

    def Stream(self, device):  # noqa: N802 - torch's own name
        self.contexts.add(device.index)
        return SimpleNamespace(device=device, wait_event=lambda event: None, synchronize=lambda: None)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self.set_device(stream.device)
        yield
        self.set_device(before)

    def current_stream(self):
        self.contexts.add(self.current)
        return SimpleNamespace(record_event=lambda: None)

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=self._register)

    def _register(self, address, size, flags):
        self.contexts.add(self.current)
        self.registered.append((address, size))
        self._local.error = self.register_code
        return self.register_code

    @staticmethod
    def CudaError(code):  # noqa: N802 - torch's own name
        return RuntimeError(f"out of memory ({code})")
