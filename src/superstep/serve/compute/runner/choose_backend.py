"""Backend of a rank: torch, unit by unit, or the compiled decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.kernels.compile_cpp import BuildResult
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder, can_compile
from superstep.serve.compute.compiled.compiled_exact import compile_exactly
from superstep.serve.compute.kernels.build import build
from superstep.serve.compute.kv_cache import KvCache
from superstep.serve.compute.linears.fast_linears import make_fast
from superstep.serve.compute.linears.gptq import calibrate
from superstep.serve.compute.linears.quantize import format_named
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.paged_attention import PagedAttention
from superstep.serve.compute.runner.model_runner import Compute
from superstep.serve.compute.runner.weight_update import RankMemory
from superstep.serve.compute.serving_model import ServedUnits
from superstep.serve.compute.tiled_kv_cache import TiledAttention, TiledKvCache, can_tile
from superstep.serve.compute.torch_forward import TorchForward


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSettings:
    """Settings of the compute backend.

    Attributes:
        pages: of the KV cache.
        page_tokens: positions of a page.
        quantize: a name of ``quantize.FORMATS``; empty keeps the weights.
        kernels: the folder for the compiled decoder; None uses torch.
        threads: of a step in exact mode; torch's own operations have one.
        has_adapters: whether there are adapters from the start.
        calibration: windows of tokens by which codes of 4 bits are chosen; () rounds to the nearest.
    """

    pages: int
    page_tokens: int
    quantize: str
    kernels: Path | None
    threads: int
    has_adapters: bool = False
    calibration: tuple[tuple[int, ...], ...] = ()


def choose(
    served: ServedUnits, settings: ComputeSettings, tp: Group | None, device: Device
) -> tuple[Compute, RankMemory]:
    """The forward of a rank's model, and the memory of its weights and KV cache.

    Args:
        served: the units, with their weights.
        settings: of the backend.
        tp: the ranks that share the model; None for one rank.
        device: of the computation.
    """
    shape, is_exact = served.run.shape, served.run.plan.grain is not None
    dtype = next(iter(served.params.values())).values.dtype
    ranks = 1 if tp is None else tp.size()
    heads, kv_heads, head_dim = shape.heads // ranks, shape.kv_heads // ranks, shape.head_dim
    room = {"layers": shape.layers, "pages": settings.pages, "page_tokens": settings.page_tokens}
    room |= {"kv_heads": kv_heads, "head_dim": head_dim}
    takes = can_tile(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=settings.page_tokens, dtype=dtype)
    built = (
        build(settings.kernels)
        if settings.kernels is not None and device.torch.type == "cpu" and takes
        else BuildResult(None)
    )

    if is_exact:
        # Exact mode defines adapters by torch's products; the compiled decoder does not support them.
        if built.library is not None and tp is None and not settings.has_adapters:
            tiled = TiledKvCache(**room)
            compute = compile_exactly(built.library, served, tiled, settings.threads)
            if compute is not None:
                return compute.compute, RankMemory(served, tiled, compute.products)
        linears = None
    else:
        first_packs = None
        if settings.calibration:
            first_packs = calibrate(served, format_named(settings.quantize), settings.calibration)
        linears = make_fast(served.modules, built, quantize=settings.quantize or None, first_packs=first_packs)
    # The compiled attention has neither soft cap nor position bias nor sinks.
    is_plain = not shape.has_blockwise_rule and not shape.style.attention_sinks
    if built.library is None or linears is None or not is_plain:
        store = KvCache(**room, dtype=dtype, device=device.torch)
        attending = PagedAttention(store, is_exact=is_exact)
        return TorchForward(served, attending, tp, device), RankMemory(served, store, linears)
    tiled = TiledKvCache(**room)
    memory = RankMemory(served, tiled, linears)
    if tp is None and can_compile(shape, served.modules, linears):
        return CompiledDecoder(built.library, shape, served.modules, linears, tiled, Adapters(served, tp)), memory
    return TorchForward(served, TiledAttention(built.library, tiled), tp, device), memory
