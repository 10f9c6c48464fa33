"""From a corpus to global batches, and from these to a rank's microbatches."""

from __future__ import annotations

from torch import Tensor

from superstep.data.stream import Stream
from superstep.data.tokens import Corpus, SplitName
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Plan
from superstep.plan.split.sequence import positions
from superstep.runtime.executor import Microbatch
from superstep.runtime.mesh import Mesh


def stream_of(config: RunConfig, corpus: Corpus, split: SplitName) -> Stream:
    """A split of the corpus, as the run reads it."""
    return Stream(
        corpus,
        split,
        sequence_tokens=config.data.sequence_tokens,
        packed=config.data.packed,
        batch_sequences=config.train.batch_sequences,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
    )


def rows(plan: Plan, mesh: Mesh) -> slice:
    """The rows of the global batch that this rank's data-parallel place trains on."""
    count = plan.microbatches * plan.microbatch
    return slice(mesh.at.dp * count, (mesh.at.dp + 1) * count)


def microbatches(
    tokens_BS: Tensor, targets_BS: Tensor, plan: Plan, mesh: Mesh, starts_BS: Tensor | None = None
) -> list[Microbatch]:
    """This rank's tokens of its rows, cut into microbatches on its device.

    Each has ``starts_BS`` of its rows whole, on the host, whichever tokens the rank holds.
    """
    device = mesh.device.torch
    if mesh.shape.cp > 1:
        held = list(positions(tokens_BS.shape[1], cp=mesh.shape.cp, rank=mesh.at.cp))
        tokens_BS, targets_BS = tokens_BS[:, held], targets_BS[:, held]
    count = len(tokens_BS) // plan.microbatch
    starts = [None] * count if starts_BS is None else starts_BS.split(plan.microbatch)
    parts = zip(tokens_BS.split(plan.microbatch), targets_BS.split(plan.microbatch), starts, strict=True)
    return [Microbatch(tokens=x.to(device), targets=y.to(device), starts=at) for x, y, at in parts]
