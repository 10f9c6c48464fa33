"""The LoRA adapters of a rank: one product for the rows of all requests, and each adapter's addition to its own rows.

    rows of the step     | plain ... | adapter 1 | adapter 2 ...... |        neighbours, so that each is a slice
    base(x)              |========== one product for all ==========|
    scale · B(A(x))                  |-- one ----|-- one ----------|        for each linear of an adapter

So the model's weights are not changed; they may be packed or quantized, and updated (S-LoRA, Sheng 2023). An addition
is row-local, as products are: exact mode uses the same products, so that a row's bits depend neither on the other rows
nor on tp. There the sum over a cut input is over cells, as the linear's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.layers.implementation import replace_forward
from superstep.model.files.peft_adapter import Adapter, linears_of, read_adapter
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.lora_kernels import AdapterBatch, Additions, Factors, now_of
from superstep.serve.compute.serving_model import ServedUnits
from superstep.serve.files.reader import BackgroundReader


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear with possible adapters.

    Attributes:
        layer: the linear.
        weight: its name.
        outputs: the part of the global tensor's outputs that this rank holds.
        inputs: likewise, of its inputs.
        additions: the adapters' additions.
    """

    layer: nn.Module
    weight: str
    outputs: slice
    inputs: slice
    additions: Additions


class Adapters:
    """The adapters on a rank, in the dtype of its weights.

    Args:
        served: the units; their forwards are replaced when the first adapter is added.
        tp: the ranks that share the model; None for one rank.
        refusal: why the model supports no adapters; empty where it does.

    Attributes:
        folder: of the latest adapter that was read.
    """

    def __init__(self, served: ServedUnits, tp: Group | None, refusal: str = "") -> None:
        self.refusal = refusal
        self.folder = Path()
        self._reader: BackgroundReader[Adapter] | None = None
        self.linears = linears_of(served.run.shape)
        self._served = served
        self._tp = tp
        self._sites: dict[str, LoraSite] = {}
        self._now: AdapterBatch | None = None
        self._changes = 0

    @property
    def changes(self) -> int:
        """Number of additions and removals of adapters."""
        return self._changes

    def factors(self, layer: nn.Module) -> Mapping[int, Factors]:
        """The factors of a linear, by adapter number."""
        return next((site.additions.factors for site in self._sites.values() if site.layer is layer), {})

    @property
    def numbers(self) -> set[int]:
        """Numbers of the adapters in memory."""
        return {number for site in self._sites.values() for number in site.additions.factors}

    @property
    def reader(self) -> BackgroundReader[Adapter]:
        """The reader of the adapter that is being read."""
        assert self._reader is not None, "an adapter is read"
        return self._reader

    def read(self, folder: Path, timeout_s: float) -> None:
        """Start to read an adapter in the background, within ``timeout_s``."""
        assert self._reader is None, "one at a time"
        self.folder = folder
        self._reader = BackgroundReader(
            folder, lambda progress: read_adapter(folder, self.linears), timeout_s=timeout_s
        )

    def take_read(self) -> Adapter:
        """Wait for the reader, and return its adapter.

        Raises:
            UserError: it cannot be read, or the time is over.
        """
        reader, self._reader = self.reader, None
        return reader.result()

    @torch.no_grad()
    def put(self, number: int, adapter: Adapter) -> None:
        """Add an adapter under a number."""
        self._changes += 1
        if not self._sites:
            self._sites = {name: site for name, site in sites_of(self._served, self._tp) if name in self.linears}
            for site in self._sites.values():
                replace_forward(site.layer, self._adding(site.additions, site.layer.forward))
        for name, part in adapter.parts.items():
            site = self._sites[name]
            weight = self._served.params[site.weight].values
            a_RI, b_OR = (
                factor.to(weight, copy=True, memory_format=torch.contiguous_format)
                for factor in (part.a[:, site.inputs], part.b[site.outputs])
            )
            site.additions.factors[number] = Factors(a_RI, b_OR, adapter.scale(name))

    def drop(self, number: int) -> None:
        self._changes += 1
        for site in self._sites.values():
            site.additions.drop(number)

    def begin(self, parts: Sequence[RequestRows], device: torch.device) -> None:
        """Set the rows of the next step."""
        self._now = now_of(parts, device) if self._sites else None

    def _adding(self, additions: Additions, inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            out = inner(x)
            if self._now is not None:
                additions.add(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]), self._now)
            return out

        return forward


def sites_of(served: ServedUnits, tp: Group | None) -> Iterator[tuple[str, LoraSite]]:
    """Every matrix of the units, by its global name without ``.weight``."""
    grain, rules = served.run.plan.grain, served.run.plan.rules
    for spec, module in zip(served.specs, served.modules, strict=True):
        for local, param in spec.params.items():
            path, _, leaf = local.rpartition(".")
            if leaf != "weight" or len(param.axes) != 2 or param.stack:
                continue
            outputs, inputs = served.params[param.name].index
            is_cut_in = rules.cut(param.axes[1] or "") == "tp"
            cells = None if grain is None else 1
            if grain is not None and is_cut_in:
                cells = grain.cells // (1 if tp is None else tp.size())
            additions = Additions(cells, tp if is_cut_in else None)
            name = param.name.removesuffix(".weight")
            yield name, LoraSite(module.get_submodule(path), param.name, outputs, inputs, additions)
