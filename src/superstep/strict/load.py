"""Loads the strict device into torch, which checks once for a GPU: so this comes before torch is imported."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from superstep.strict.build import MODULE, build_library, torch_folder
from superstep.strict.import_hook import ImportHook
from superstep.strict.settings import Settings

LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
"""Torch's libraries, in the order of their dependencies."""


def load(settings: Settings) -> ModuleType:
    """Torch with the configured number of emulated GPUs, and NCCL between them.

    Raises:
        ConfigError: the device cannot be built here.
        RuntimeError: torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the strict device has to be loaded before it.")
    library = build_library()
    faulthandler.enable()  # reports the line that accessed memory of the device
    for name in LIBRARIES:
        ctypes.CDLL(str(torch_folder() / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    sys.modules[MODULE] = device
    configure(device, settings)
    torch = importlib.import_module("torch")
    # These import torch, and so cannot be imported before.
    importlib.import_module("superstep.strict.torch_cuda").install(device)
    importlib.import_module("superstep.strict.gpu_operators").install(device)
    importlib.import_module("superstep.strict.nccl.process_group").install(device)
    sys.modules["superstep.kernels.gpu.invariant"] = importlib.import_module(
        "superstep.strict.triton.invariant_products"
    )
    sys.meta_path.insert(0, _triton_hook(device))
    atexit.register(device.stop)
    return torch


def _triton_hook(device: ModuleType) -> ImportHook:
    """Triton is imported at its first kernel: it must run kernels as Python, as tasks of the device."""

    def interpret(knobs: ModuleType) -> None:
        knobs.runtime.interpret = True

    def launch(_: ModuleType) -> None:
        importlib.import_module("superstep.strict.triton.triton_launch").install(device)

    return ImportHook({"triton.knobs": interpret, "triton.runtime.interpreter": launch})


def configure(device: ModuleType, settings: Settings) -> None:
    """Change the order of tasks; the devices only before their first use."""
    device.configure(
        settings.devices,
        settings.device_bytes,
        settings.seed,
        settings.delay_us,
        settings.order,
        settings.raises,
    )
