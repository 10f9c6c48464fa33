"""A recipe's model as a user of plain PyTorch trains it: DDP, torch's own layers, autocast, a fused AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superstep.data.batch import Batch
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import cross_entropy_sum
from superstep.numerics.noise import SamplePlace
from superstep.plan.resolution.resolve import Resolved


class TorchNoise:
    """Random numbers of torch's generator, in place of those by place."""

    def __init__(self, *, is_training: bool) -> None:
        self.place = SamplePlace(is_training=is_training)

    def uniform(self, _: str, like: Tensor) -> Tensor:
        return torch.rand(like.shape, device=like.device)

    def normal(self, _: str, like: Tensor) -> Tensor:
        return torch.randn(like.shape, device=like.device)


class Chain(nn.Module):
    """Units, one after another, with torch's batch norm."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(use_torch_norms(unit.build()) for unit in units)
        self.noisy = ["noise" in unit.takes for unit in units]

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last unit."""
        for part, is_noisy in zip(self.parts, self.noisy, strict=True):
            x = part(x, noise=TorchNoise(is_training=self.training)) if is_noisy else part(x)
        return x


def use_torch_norms(module: nn.Module) -> nn.Module:
    """The module with each batch norm over groups of samples replaced by torch's."""
    for path, layer in list(module.named_modules()):
        if isinstance(layer, BatchNorm):
            norm = nn.BatchNorm2d(len(layer.weight), eps=layer.eps, momentum=layer.momentum)
            norm.load_state_dict(layer.state_dict(), strict=False)
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, norm)
    return module


class PlainDdp:
    """One rank's trainer.

    Args:
        run: the recipe; its layout is left out.
        units: a chain.
        ranks: of the default group.
    """

    def __init__(self, run: Resolved, units: Sequence[UnitSpec], ranks: int) -> None:
        train = run.config.train
        self.ranks, self.clip_norm = ranks, train.clip_norm
        self.is_bf16 = run.config.numerics.compute == "bf16"
        self.loss = units[-1].loss or cross_entropy_sum
        with torch.device("cpu"):
            self.chain = Chain(units)
        self.model: nn.Module = DistributedDataParallel(
            self.chain, gradient_as_bucket_view=True, forward_sync_buffers=False, static_graph=True
        )
        if run.config.numerics.compile:
            self.model.compile()
        matrices = [p for p in self.chain.parameters() if p.ndim > 1]
        vectors = [p for p in self.chain.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )

    def train(self, batch: Batch, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        nats = self.loss(self._logits(self.model, batch), batch.targets_BS)
        loss = nats * self.ranks / batch.valid_tokens  # DDP divides the sum over ranks by their number
        loss.backward()
        nn.utils.clip_grad_norm_(self.chain.parameters(), self.clip_norm)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def count_right(self, batch: Batch) -> float:
        self.chain.eval()
        guessed = self._logits(self.chain, batch).argmax(-1)
        self.chain.train()
        right = (guessed == batch.targets_BS.view_as(guessed)).sum()
        dist.all_reduce(right)
        return float(right)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            out: Tensor = model(batch.input)
        return out
