"""Where Triton's kernels run in tests: in its interpreter, which takes tensors of a CPU, or on a GPU.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/gpu     interpreted; so does tests/kernels/test_triton.py
    python -m pytest -m gpu tests/kernels/gpu                 on a GPU

Whether kernels are interpreted is settled when Triton is imported, so a process has the one or the other.
"""

from __future__ import annotations

import importlib.util
import inspect
import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_THERE = importlib.util.find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())

collect_ignore_glob = [] if IS_THERE else ["test_*.py"]


@pytest.fixture(params=["cpu"] if IS_INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors lie, as torch names it."""
    return request.param


def pytest_configure():
    if IS_INTERPRETED and IS_THERE:
        _patch_once()


def _patch_once():
    """The interpreter wraps Triton's language anew at every call of a function by a kernel, each time round what was
    wrapped before: three quarters of the seconds. Here it does so once for each launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    class Scope:
        def restore(self):
            while scopes:
                scopes.popitem()[1].restore()

    def patch_once(fn):
        key = frozenset(id(x) for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core))
        if key not in scopes:
            scopes[key] = patch(fn)
        return Scope()

    interpreter._patch_lang = patch_once
