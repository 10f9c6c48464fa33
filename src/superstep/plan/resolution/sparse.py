"""Tables with sparse gradients: a step reduces and updates the rows that it touches, and no others.

    nn.Embedding(rows, width, sparse=True)

So the update of a row must depend on that row's gradient alone: AdamW and Lion move a row by its moments in steps that
do not touch it, and weight decay shrinks every row.
"""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.model.outline import Outline


def check_sparse(config: RunConfig, outline: Outline) -> None:
    """Refuse settings that would change rows without a gradient; raises ConfigError."""
    tables = [p.name for owned in outline.owned for p in owned if p.is_sparse and not p.is_frozen]
    if not tables:
        if config.train.clip_row_norm is not None:
            raise ConfigError(
                f"train.clip_row_norm = {config.train.clip_row_norm} is for tables with sparse gradients, and the "
                "model has none; leave it out, or make a table with sparse=True."
            )
        return
    train, table = config.train, f"'{tables[0]}' has a sparse gradient (sparse=True)"
    if train.optimizer != "sgd":
        raise ConfigError(
            f"train.optimizer = '{train.optimizer}' changes rows that a step does not touch, and {table}; set "
            "train.optimizer to 'sgd', or make the table without sparse=True."
        )
    if train.weight_decay:
        raise ConfigError(
            f"train.weight_decay = {train.weight_decay} shrinks rows that a step does not touch, and {table}; set "
            "train.weight_decay to 0, or make the table without sparse=True."
        )
    for owned in outline.owned if train.clip_row_norm is not None else ():
        if len(widths := {p.dims[1:] for p in owned if p.is_sparse}) > 1:
            raise ConfigError(
                f"train.clip_row_norm = {train.clip_row_norm} with tables of {len(widths)} widths in one unit is not "
                "supported; give each width a unit of its own, or leave it out."
            )
    if config.numerics.compile:
        raise ConfigError(
            f"numerics.compile = true makes the gradients of whole tables, and {table}; leave numerics.compile out."
        )
