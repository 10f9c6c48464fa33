"""One step through the model: rows in, logits of the wanted rows out.

T  rows of the step      D  width
R  wanted rows           V  vocabulary, padded where tp or exact mode's cells do not divide it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from superstep.comm.collectives import stack_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.model.decoder import Attend
from superstep.numerics.invariant_matmul import product
from superstep.numerics.sending import send
from superstep.numerics.soft_cap import exact_tanh, soft_cap
from superstep.plan.sharding.parameters import has_cut_output
from superstep.serve.compute.flat_batch import RequestRows, Rows, positions
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.sampler import totals_of
from superstep.serve.compute.serving_model import ServedUnits

Attending = Callable[[Sequence[RequestRows]], Callable[[int], Attend]]
"""Takes the parts of a step, returns the ``attend`` of each layer."""


class TorchForward:
    """The model of one rank, unit by unit.

    Args:
        served: its units.
        attending: attention with the KV cache.
        tp: the ranks that share the model; None for one rank.
        device: of the computation.
    """

    leaves_rows = False

    def __init__(self, served: ServedUnits, attending: Attending, tp: Group | None, device: Device) -> None:
        self.adapters = Adapters(served, tp)
        self._served = served
        self._attending = attending
        self._tp = tp
        self._device = device.torch
        self._vocab = served.run.shape.vocab

    @torch.inference_mode()
    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32, the same on every rank: [R, V]."""
        served, device = self._served, self._device
        self.adapters.begin(rows.parts, device)
        place_1T = send(torch.tensor([positions(rows.parts)]), device)
        attend = self._attending(rows.parts)
        embed, *blocks, _ = served.modules
        h_1TD = embed(send(torch.tensor([rows.tokens]), device))
        given = {"exchange": served.exchange} if served.run.shape.moe else {}
        for layer, block in enumerate(blocks):
            h_1TD = block(h_1TD, attend=attend(layer), positions=place_1T, **given)
        if not rows.wanted:  # a prompt's chunk alone; some operations do not support zero rows
            return torch.empty(0, self._vocab, device=device)
        return self._logits(h_1TD[:, send(torch.tensor(rows.wanted), device)])

    def totals(self, logits_RV: Tensor) -> Tensor:
        """``LogitTotals`` of each of these rows, in fast mode: [R, 3]."""
        return totals_of(logits_RV)

    def _logits(self, h_1RD: Tensor) -> Tensor:
        out_1RX = self._served.head(h_1RD)
        if self._served.run.plan.grain is not None:  # in exact mode the head leaves the product to the code below
            part_RW = product(out_1RX[0], self._served.head.lm_head.weight.t())
            if self._served.head.logit_cap is not None:
                part_RW = soft_cap(part_RW, self._served.head.logit_cap, exact_tanh)
        else:
            part_RW = out_1RX[0].float()
        if self._tp is not None and has_cut_output(self._served.run.outline, self._served.run.plan.rules):
            part_RW = torch.cat(stack_ranks(part_RW, self._tp).unbind(), -1)
        part_RW[:, self._vocab :] = float("-inf")
        return part_RW
