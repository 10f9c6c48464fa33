"""The adapters of a rank: rows of many requests in one product of the model's, and beside it what each adapter adds.

    rows of the step     | plain ... | adapter 1 | adapter 2 ...... |        neighbours, so that each is a slice
    base(x)              |========== one product for all ==========|
    scale · B(A(x))                  |-- one ----|-- one ----------|        for each linear that the adapter adds to

So the model's weights stay as they are, packed or quantized, and may be swapped below (S-LoRA, Sheng 2023).
An addition is row-local, as products are: in exact mode by the same products, so that a row's bits do not depend on
whose rows stand beside it, nor on tp. There the sum over a cut input is that over cells, as the linear's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.layers.implementation import replace_forward
from superstep.model.peft_adapter import Adapter, linears_of, read_adapter
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.lora_kernels import AdapterBatch, Additions, Factors, now_of
from superstep.serve.compute.serving_model import ServedUnits
from superstep.serve.files.reader import BackgroundReader


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear that adapters add to.

    Attributes:
        layer: itself.
        weight: its name.
        outputs: those held here, of the global tensor.
        inputs: the same.
        additions: what is added.
    """

    layer: nn.Module
    weight: str
    outputs: slice
    inputs: slice
    additions: Additions


class Adapters:
    """The adapters that a rank holds, in the dtype of its weights.

    Args:
        served: the units, whose forwards change when the first adapter comes.
        tp: the ranks that share the model; None where there is one.
        refusal: why there can be none; empty where there can.

    Attributes:
        folder: that is being read, or was last.
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
        """Times that an adapter came or went."""
        return self._changes

    def factors(self, layer: nn.Module) -> Mapping[int, Factors]:
        """What is added to a linear, by the adapter's number."""
        return next((site.additions.factors for site in self._sites.values() if site.layer is layer), {})

    @property
    def numbers(self) -> set[int]:
        """Of the adapters that are held."""
        return {number for site in self._sites.values() for number in site.additions.factors}

    @property
    def reader(self) -> BackgroundReader[Adapter]:
        """Of the adapter that is being read."""
        assert self._reader is not None, "an adapter is read"
        return self._reader

    def read(self, folder: Path, timeout_s: float) -> None:
        """Begin to read an adapter, beside whatever is computed; it is given up after so long."""
        assert self._reader is None, "one at a time"
        self.folder = folder
        self._reader = BackgroundReader(
            folder, lambda progress: read_adapter(folder, self.linears), timeout_s=timeout_s
        )

    def take_read(self) -> Adapter:
        """What was read, which is not kept here. Waits for it.

        Raises:
            UserError: it cannot be read, or did not come in time.
        """
        reader, self._reader = self.reader, None
        return reader.result()

    @torch.no_grad()
    def put(self, number: int, adapter: Adapter) -> None:
        """Hold an adapter under a number."""
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
        """Let go of an adapter."""
        self._changes += 1
        for site in self._sites.values():
            site.additions.drop(number)

    def begin(self, parts: Sequence[RequestRows], device: torch.device) -> None:
        """Say whose rows come next."""
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
