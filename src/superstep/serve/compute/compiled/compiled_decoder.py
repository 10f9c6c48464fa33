"""One step through a dense model in one call of the compiled decoder.

A call of torch costs a few microseconds. A model makes several hundred for each token, which takes as long as reading
its weights. Here threads synchronise after each phase, and no Python runs between phases.

    T  rows of the step      R  wanted rows      V  vocabulary
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from superstep.model.decoder import Block as BlockModule
from superstep.model.decoder import Embedding, Head
from superstep.model.feedforward import FeedForward
from superstep.model.norm import RMSNorm
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.style import LLAMA
from superstep.serve.compute.compiled.compiled_lora import AdaptedRows
from superstep.serve.compute.flat_batch import Rows
from superstep.serve.compute.kernels.calls import BlockArgs, ModelArgs, StepArgs, Weight, address, as_array, pointer
from superstep.serve.compute.linears.fused_linears import Product
from superstep.serve.compute.linears.panel_weights import PanelLinear
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.sampler import columns
from superstep.serve.compute.tiled_kv_cache import PlacedRows, TiledKvCache

NEVER = -1


class LaidOutLinears(Protocol):
    """The products of a model's linears."""

    changes: int
    """Times that weights were replaced or dropped."""

    def product(self, layer: nn.Module) -> Product | None:
        """The product that computes a layer, joined with the layers of the same input."""


@dataclass(frozen=True, slots=True)
class ExactArgs:
    """Settings of the decoder in exact mode.

    Attributes:
        functions: addresses of the exponential, the root, and the trainer's attention to a block of keys.
        threads: of a step; torch's own operations have one.
    """

    functions: tuple[int, int, int]
    threads: int


class CompiledDecoder:
    """A dense model on one rank, with its KV cache.

    Args:
        library: the compiled decoder.
        shape: of the model.
        modules: its units.
        linears: their products; all are ``PanelLinear``.
        store: the KV cache.
        exact: settings of exact mode; None in fast mode.
        adapters: LoRA adapters of the rank.
    """

    leaves_rows = True

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: ModelShape,
        modules: Sequence[nn.Module],
        linears: LaidOutLinears,
        store: TiledKvCache,
        adapters: Adapters,
        *,
        exact: ExactArgs | None = None,
    ) -> None:
        self.adapters = adapters
        self._adapted = AdaptedRows(adapters, modules)
        self._ways = (None, None, None) if exact is None else exact.functions
        self._threads = None if exact is None else exact.threads
        self._library = library
        self._shape = shape
        self._modules = modules
        self._linears = linears
        self._store = store
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._cosine = self._sine = torch.empty(0, shape.head_dim, dtype=torch.bfloat16)
        self._located = NEVER
        library.superstep_scratch.restype = ctypes.c_int64

    def _find(self) -> None:
        """Read the current addresses of the weights."""
        shape = self._shape
        self._located = self._linears.changes
        embedding, *blocks, head = self._modules
        assert isinstance(embedding, Embedding)
        assert isinstance(head, Head)
        self._blocks = (BlockArgs * len(blocks))(*map(self._block, blocks))
        self._model = ModelArgs(
            pointer(embedding.embed_tokens.weight),
            self._blocks,
            len(blocks),
            shape.width,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.ffn,
            shape.norm_eps,
            pointer(head.norm.weight),
            *self._ways,
            self._weight(head.lm_head),
        )

    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32: [R, V]."""
        if self._located != self._linears.changes:
            self._find()
        count = len(rows.tokens)
        self._reach(max(part.first + part.count for part in rows.parts))
        placed = PlacedRows(rows.parts, self._store.page_tokens, self._shape.window)
        tokens, wanted = as_array(rows.tokens, "q"), as_array(rows.wanted, "q")
        logits_RV = torch.empty(len(wanted), self._model.head.outputs, dtype=torch.float32)
        step = StepArgs(
            count,
            address(tokens),
            pointer(self._cosine),
            pointer(self._sine),
            placed.places,
            address(wanted),
            len(wanted),
            pointer(logits_RV),
            pointer(self._room(count)),
            self._adapted.of(rows.parts),
        )
        self._library.superstep_forward(byref(self._model), byref(self._store.all), byref(step), self._team)
        if self._model.head.outputs > self._shape.vocab:
            logits_RV[:, self._shape.vocab :] = float("-inf")
        return logits_RV

    def totals(self, logits_RV: Tensor) -> Tensor:
        """``LogitTotals`` of each row, in fast mode: [R, 3]."""
        rows, stride = logits_RV.shape
        largest, log_total = torch.empty(2, rows, dtype=torch.float32)
        likeliest = torch.empty(rows, dtype=torch.int64)
        sizes = (ctypes.c_int64(size) for size in (rows, self._shape.vocab, stride))
        into = (ctypes.c_void_p(pointer(x)) for x in (largest, log_total, likeliest))
        self._library.superstep_totals(ctypes.c_void_p(pointer(logits_RV)), *sizes, *into, self._team)
        return columns(largest, log_total, likeliest)

    @property
    def _team(self) -> ctypes.c_int64:
        """Number of threads of a step."""
        return ctypes.c_int64(self._threads or torch.get_num_threads())

    def _reach(self, tokens: int) -> None:
        """Extend the rotary tables to ``tokens`` positions or more."""
        if tokens > len(self._cosine):
            places = torch.arange(1 << (tokens - 1).bit_length())
            cosine, sine = (x.squeeze(-2) for x in self._rope.tables(places, torch.bfloat16))
            self._cosine, self._sine = cosine.contiguous(), sine.contiguous()

    def _room(self, rows: int) -> Tensor:
        size = self._library.superstep_scratch(byref(self._model), ctypes.c_int64(rows), self._team)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch

    def _block(self, block: nn.Module) -> BlockArgs:
        assert isinstance(block, BlockModule)
        assert isinstance(block.mlp, FeedForward)
        attention = block.self_attn
        self._rope = attention.rope
        norms = (block.input_layernorm, attention.q_norm, attention.k_norm, block.post_attention_layernorm)
        layers = (attention.q_proj, attention.o_proj, block.mlp.gate_proj, block.mlp.down_proj)
        return BlockArgs(*map(_norm, norms), *map(self._weight, layers))

    def _weight(self, layer: nn.Module) -> Weight:
        product = self._linears.product(layer)
        assert isinstance(product, PanelLinear)
        return product.weight


def can_compile(shape: ModelShape, modules: Sequence[nn.Module], linears: LaidOutLinears) -> bool:
    """Whether the compiled decoder supports all units of a model."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
    return (
        shape.moe is None
        and not shape.full_layers
        and shape.style == LLAMA
        and shape.positions == "rope"
        and type(modules[0]) is Embedding
        and all(type(block) is BlockModule for block in modules[1:-1])
        and all(isinstance(linears.product(layer), PanelLinear) for layer in layers)
    )


def _norm(norm: nn.Module) -> int | None:
    return pointer(norm.weight) if isinstance(norm, RMSNorm) else None
