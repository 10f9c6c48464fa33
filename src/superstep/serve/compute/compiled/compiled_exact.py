"""Exact mode's step in one call of the compiled decoder, where it gives the same bits as torch.

The trainer's exact mode is defined by torch's operations and by our own attention kernel. The compiled decoder calls
that kernel, and sums in torch's order (``kernels/exact.h``), which was determined by comparison. Each start checks that
order against this torch on this machine: with sums that cancel, and with the model's first layer and head. Where a bit
differs, torch computes; AMX's tiles, for example, sum in another order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from superstep.comm.device import Device
from superstep.kernels.exact_attention import block_address
from superstep.numerics.invariant_matmul import PIECE, product
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder, ExactArgs, can_compile
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.kv_cache import KvCache
from superstep.serve.compute.linears.fused_linears import Product, ValueOf, join, rows_of
from superstep.serve.compute.linears.panel_weights import PanelLinear, takes
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.paged_attention import PagedAttention
from superstep.serve.compute.serving_model import ServedUnits
from superstep.serve.compute.tiled_kv_cache import TiledKvCache
from superstep.serve.compute.torch_forward import TorchForward

NO_ADAPTERS = (
    "adapters with serve.exact = true are added by torch's products, and this server computes in the compiled decoder; "
    "start it with --serve.adapters, or with --serve.kernels off."
)

MOST_CELLS = 64
PROBED_TOKENS = 300
"""More than one block of keys."""

WANTED = 8
"""Rows whose logits are compared."""


def functions() -> tuple[int, int, int] | None:
    """Addresses of the exponential and the root that torch calls, and of the trainer's attention to a block of keys.
    None in a torch without MKL, or without a compiler.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        exponential, root = (ctypes.cast(each, ctypes.c_void_p).value for each in (library.vmsExp, library.vmsSqrt))
    except (OSError, AttributeError):
        return None
    attend = block_address()
    return (exponential, root, attend) if exponential and root and attend else None


class ExactProducts:
    """The products of a served model, laid out for the compiled decoder; the model's own layers are not changed.

    Args:
        library: the compiled decoder.
        served: the model, on one rank.

    Attributes:
        changes: times that weights were replaced or dropped.
    """

    def __init__(self, library: ctypes.CDLL, served: ServedUnits) -> None:
        self._library = library
        self._rows = _rows(served)
        self.changes = 0
        self._products: list[Product | None] = []
        self.beside(lambda param: param)()

    @torch.no_grad()
    def beside(self, value_of: ValueOf) -> Callable[[], None]:
        """Lay out new weights before the layers have them; the returned function installs the products."""
        made = [self._make(layers, cells, value_of) for layers, cells in self._rows]

        def place() -> None:
            self.changes += 1
            self._products = made

        return place

    def drop(self) -> None:
        """Free the memory of the laid-out weights."""
        self.changes += 1
        self._products = [None] * len(self._rows)

    def product(self, layer: nn.Module) -> Product | None:
        """The product that computes a layer, joined with the layers of the same input."""
        pairs = zip(self._rows, self._products, strict=True)
        return next((product for (layers, _), product in pairs if layer in layers), None)

    def _make(self, layers: tuple[nn.Linear, ...], cells: int, value_of: ValueOf) -> Product | None:
        weight_OI, bias_O = join(layers, value_of)
        width = weight_OI.shape[1] // cells
        if not takes(weight_OI) or cells > MOST_CELLS or width % 2:
            return None
        return PanelLinear(self._library, weight_OI, bias_O=bias_O, cells=cells)


@dataclass(frozen=True, slots=True)
class CompiledExact:
    """The function that computes a step, and its products."""

    compute: CompiledDecoder
    products: ExactProducts


def compile_exactly(
    library: ctypes.CDLL, served: ServedUnits, store: TiledKvCache, threads: int
) -> CompiledExact | None:
    """The compiled decoder of a model on one rank; None where its bits differ from torch's here.

    Args:
        library: the compiled decoder.
        served: the exact model, with its weights.
        store: the KV cache.
        threads: of a step.
    """
    addresses, shape = functions(), served.run.shape
    if addresses is None or shape.width % 8 or not sums_as_torch(library):
        return None
    products = ExactProducts(library, served)
    if not can_compile(shape, served.modules, products):
        return None
    adapters = Adapters(served, None, refusal=NO_ADAPTERS)

    def compiled(modules: Sequence[nn.Module], store: TiledKvCache) -> CompiledDecoder:
        return CompiledDecoder(library, shape, modules, products, store, adapters, exact=ExactArgs(addresses, threads))

    is_same = _is_same(served, compiled, store.page_tokens)
    return CompiledExact(compiled(served.modules, store), products) if is_same else None


def sums_as_torch(library: ctypes.CDLL) -> bool:
    """Whether the decoder sums in torch's order here. The numbers cancel, so that the result consists of rounding
    errors, which depend on the order; most sums of a model, rounded to bf16, would hide a difference.
    """
    numbers = torch.Generator().manual_seed(0)
    x_TI, weight_OI = (torch.randn(n, PIECE // 2, generator=numbers).bfloat16() for n in (PROBED_TOKENS, PIECE // 2))
    x_TI, weight_OI = torch.cat((x_TI, x_TI), 1), torch.cat((weight_OI, -weight_OI), 1)
    compute = PanelLinear(library, weight_OI, cells=1)
    counts = 1, WANTED, PROBED_TOKENS
    return all(torch.equal(compute(x), product(x, weight_OI.t()).bfloat16()) for x in (x_TI[:n] for n in counts))


def _is_same(
    served: ServedUnits, compiled: Callable[[Sequence[nn.Module], TiledKvCache], CompiledDecoder], page_tokens: int
) -> bool:
    """Whether a long prompt and the tokens after it get equal bits in the first layer and the head."""
    shape = served.run.shape
    embed, first, *_, head = served.modules
    small = replace(served, modules=(embed, first, head))
    count = min(PROBED_TOKENS, shape.max_tokens)
    pages = tuple(range(-(-count // page_tokens)))
    memory = {"layers": 1, "pages": len(pages), "page_tokens": page_tokens}
    memory |= {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    keys = KvCache(**memory, dtype=torch.bfloat16, device=torch.device("cpu"))
    attention = PagedAttention(keys, is_exact=True)
    ways = TorchForward(small, attention, None, Device("cpu")), compiled(small.modules, TiledKvCache(**memory))
    tokens = torch.randint(shape.vocab, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    for begin, end in ((0, count - 3), (count - 3, count - 1), (count - 1, count)):
        part = RequestRows(first=begin, count=end - begin, pages=pages[: -(-end // page_tokens)])
        wanted = tuple(range(max(0, end - begin - WANTED), end - begin))
        rows = Rows(tokens=tuple(tokens[begin:end]), parts=(part,), wanted=wanted)
        mine, theirs = (compute(rows) for compute in ways)
        if not torch.equal(mine, theirs):
            return False
    return True


def _rows(served: ServedUnits) -> list[tuple[tuple[nn.Linear, ...], int]]:
    """The linears, those of one input together, each with its number of cells in exact mode's sums."""
    grain, rules = served.run.plan.grain, served.run.plan.rules
    assert grain is not None
    axes = {held.values.data_ptr(): held.spec.axes for held in served.params.values()}

    def cells(layer: nn.Linear) -> int:
        return grain.cells if rules.cut(axes[layer.weight.data_ptr()][1]) == "tp" else 1

    rows = (row for module in served.modules for row in rows_of(module, lambda layer: isinstance(layer, nn.Linear)))
    return [(layers, cells(layers[0])) for layers, _ in rows]
