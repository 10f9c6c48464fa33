"""Which parameters keep their moments in fewer bits than fp32, and the blocks of those that do.

A block is 256 consecutive elements of the global tensor, counted from its start. Every rank holds whole blocks, so that
a block has one scale on every layout. Embeddings, vectors, tensors below 4,096 elements and those that blocks do not
divide keep fp32 moments.
"""

from __future__ import annotations

import math

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.model.outline import Outline, Parameter
from superstep.plan.optimizers import MOMENT_BYTES, MOMENTS
from superstep.plan.rules import Rules

BLOCK = 256
LEAST_NUMEL = 4096


def find_narrow(config: RunConfig, outline: Outline) -> frozenset[str]:
    """Names of the parameters with moments in fewer bits; none with fp32 moments."""
    if config.train.moments == "fp32":
        return frozenset()
    return frozenset(p.name for owned in outline.owned for p in owned if is_narrow(p))


def is_narrow(parameter: Parameter) -> bool:
    """Whether a parameter's moments may have fewer bits. Each expert's matrix is a tensor of its own."""
    dims = parameter.dims[1:] if "experts" in parameter.axes else parameter.dims
    numel = math.prod(dims)
    is_matrix = len(dims) > 1 and parameter.layer != "embedding"
    is_usual = not (parameter.is_statistic or parameter.is_sparse or parameter.is_frozen)
    return is_matrix and is_usual and numel >= LEAST_NUMEL and numel % BLOCK == 0


def count_saved_bytes(config: RunConfig, outline: Outline) -> int:
    """Bytes that a checkpoint has less than with fp32 moments; bf16 is written as fp32."""
    if config.train.moments != "8bit":
        return 0
    numel = sum(math.prod(p.dims) for owned in outline.owned for p in owned if is_narrow(p))
    return round(len(MOMENTS[config.train.optimizer]) * (MOMENT_BYTES["fp32"] - MOMENT_BYTES["8bit"]) * numel)


def check_narrow(config: RunConfig, outline: Outline, rules: Rules) -> None:
    """Check that the formats of moments and master weights fit together, and that tp cuts tensors between blocks;
    raises ConfigError where they do not.
    """
    _check_master(config, outline)
    if config.train.moments != "8bit" or config.plan.tp == 1:
        return
    for owned in outline.owned:
        for p in owned:
            for dim, axis in enumerate(p.axes):
                if not (is_narrow(p) and axis and rules.cut(axis) == "tp"):
                    continue
                fits = _fitting_degrees(p, dim, config.plan.tp)
                if config.plan.tp not in fits:
                    raise ConfigError(
                        f"train.moments = '8bit' with plan.tp = {config.plan.tp}: {p.name} {list(p.dims)} would be cut "
                        f"amid a block of {BLOCK} elements, whose scale is shared; set plan.tp to "
                        f"{f'one of {fits}' if len(fits) > 1 else '1'}, or train.moments to bf16."
                    )


def _fitting_degrees(p: Parameter, dim: int, most: int) -> list[int]:
    """The tensor-parallel degrees up to one that cut a dim between blocks, in each part that they cut on its own."""
    sizes, inner = p.sections if p.sections and dim == 0 else (p.dims[dim],), math.prod(p.dims[dim + 1 :])
    if inner % BLOCK == 0:  # each row ends with a block
        return list(range(1, most + 1))
    cuts = range(2, most + 1)
    return [1, *(tp for tp in cuts if all(n % tp == 0 and n // tp * inner % BLOCK == 0 for n in sizes))]


def _check_master(config: RunConfig, outline: Outline) -> None:
    if config.numerics.master == "fp32":
        return
    if config.numerics.compute != "bf16":
        raise ConfigError(
            f"numerics.master = 'bf16' with numerics.compute = '{config.numerics.compute}': the weights that multiply "
            "are the master weights then; set numerics.compute to bf16, or numerics.master to fp32."
        )
    if outline.sparse:
        raise ConfigError(
            "numerics.master = 'bf16' with tables that have sparse gradients: their rows are updated in fp32; set "
            "numerics.master to fp32."
        )
