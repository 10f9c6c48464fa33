"""A model and batches small enough that a layout takes a fraction of a second on many ranks."""

import torch

from superstep.data.batch import Batch
from superstep.numerics.loss import IGNORE
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig

VOCAB = 64
TOKENS = 16
SEQUENCES = 8


def config(
    *,
    layers=5,
    sequences=SEQUENCES,
    tied=True,
    packed=True,
    masked=False,
    compute="fp32",
    exact=False,
    qk_norm=True,
    kernels="auto",
    dropout=0.0,
    **plan,
):
    return RunConfig(
        model=ModelConfig(
            name="tiny",
            layers=layers,
            width=32,
            heads=8,
            kv_heads=8,
            head_dim=4,
            ffn=64,
            vocab=VOCAB,
            tied=tied,
            qk_norm=qk_norm,
            dropout=dropout,
        ),
        data=DataConfig(sequence_tokens=TOKENS, packed=packed, document_mask=masked),
        train=TrainConfig(batch_sequences=sequences, warmup_steps=1, steps=10, clip_norm=0.2, lr=5e-4),
        plan=PlanConfig(**plan),
        numerics=NumericsConfig(compute=compute, exact=exact, kernels=kernels),
    )


def layers_for(plan):
    """The fewest blocks that a plan's stages can share: what more would find, they find."""
    return max(2, plan.get("pp", 1) * plan.get("chunks", 1), sum(plan.get("stages", ())) - 2)


def microbatch_for(plan):
    """Sequences of a microbatch, of eight: a rank has two to add up, and a long pipeline one for each of its ranks."""
    return 2 if plan.get("dp", 1) > 1 or plan.get("pp", 1) > 2 else 4


def pieces_for(plan):
    """Pieces of exact mode's sums, each of which takes time: four, which have a tree, or two for each rank of cp."""
    return max(4, 2 * plan.get("cp", 1))


def batches(*, steps=2, sequences=SEQUENCES, packed=True, seed=1, tokens=TOKENS, masked=False):
    """Global batches; not packed, the rows end at different places, so that no two ranks have as many targets. Masked,
    each row has documents of its own, from one to one for every other token, and no target at their ends.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        row_tokens = torch.randint(0, VOCAB, (sequences, tokens + 1), generator=generator)
        targets = row_tokens[:, 1:].clone()
        if not packed:
            for row in range(sequences):
                targets[row, tokens - (row * 5) % (tokens - 1) :] = IGNORE
        starts = None
        if masked:
            is_first = torch.rand(sequences, tokens + 1, generator=generator) < torch.arange(sequences)[:, None] / 14
            targets[is_first[:, 1:]] = IGNORE
            starts = (torch.arange(tokens) * is_first[:, :-1]).cummax(dim=1).values
        found.append(
            Batch({"tokens": row_tokens[:, :-1].contiguous()}, targets, int((targets != IGNORE).sum()), starts)
        )
    return tuple(found)
