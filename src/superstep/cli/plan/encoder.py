"""superstep plan RUN.toml --encoder: where the encoder of a run should be, with its predicted steps on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superstep.cli.flags.options import read_flags, read_run
from superstep.comm.device import pick
from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.predict import Prediction, predict
from superstep.data.samples.ragged_rows import pack_rows
from superstep.data.sources.source import open_any_samples
from superstep.engine.measure.probe_machine import measure
from superstep.errors import ConfigError
from superstep.observe.number_format import bytes_text, seconds_text
from superstep.plan.config import RunConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.ranking.rank_encoders import Pictures, PlacedEncoder, rank_encoders, read_pictures
from superstep.train.weights.model import operations, resolve_config

DESCRIPTION = (
    "Rank the places of an encoder of pictures or sounds (plan.encoder) in the layout of RUN.toml and the flags, by "
    "their steps on this machine. How many pictures samples have is read from the data."
)
SAMPLES = 2000
"""The samples whose pictures are counted."""


def main(argv: Sequence[str]) -> int:
    """Print the places, the fastest first."""
    words = [word for word in argv if word not in ("--encoder", "--encoder=true")]
    has_run = bool(words) and not words[0].startswith("-")
    base = read_run(Path(words[0])) if has_run else RunConfig()
    config = read_flags(base, words[has_run:], prog="superstep plan RUN.toml --encoder", description=DESCRIPTION)
    if not has_run:
        raise ConfigError("no run is given; name a run.toml, then any flags: superstep plan run.toml --encoder.")
    first = resolve_config(replace(config, plan=replace(config.plan, encoder="front")))
    if not first.outline.encoder:
        raise ConfigError(f"{config.model.label} has no encoder; leave --encoder out.")
    machine = _measure(first)
    ranked, refused = rank_encoders(
        lambda place: resolve_config(replace(config, plan=replace(config.plan, encoder=place))),
        lambda run: _predict(run, machine),
    )
    for pictures in _count_pictures(config):
        print(_describe(pictures))
    print(_table(ranked))
    print("\n".join(f"not possible: {reason}" for reason in refused), end="\n" if refused else "")
    if ranked:
        print(f"fastest: --plan.encoder {ranked[0].run.plan.encoder}")
    return 0


def _measure(run: Resolved) -> MeasuredMachine:
    traced = operations(run)
    if traced is None:
        raise ConfigError(
            f"{run.config.model.label}: the work of its units depends on data; its steps are not predicted."
        )
    return measure(run, pick(0, run.config.plan.device), traced)


def _predict(run: Resolved, machine: MeasuredMachine) -> Prediction:
    return predict(run, machine, operations(run))


def _count_pictures(config: RunConfig) -> list[Pictures]:
    """Of each encoder's field, from the first samples."""
    if config.data.source is None:
        return []
    samples = open_any_samples(config.data.source)
    if samples.size is None:
        return []
    sizes = [samples.measure("train", index) for index in range(min(SAMPLES, samples.lengths["train"]))]
    rows = len(pack_rows(sizes, samples.fields.capacities).samples)
    return [
        read_pictures(name, [one[name] for one in sizes], rows=rows, capacity=samples.fields.capacities[name])
        for name in samples.fields.placeholders
    ]


def _describe(pictures: Pictures) -> str:
    tenth, half, most = pictures.quantiles
    return (
        f"{pictures.field} of a sample: {tenth} (10%), {half} (50%), {most} (90%); packed rows are "
        f"{pictures.filled:.0%} full of them"
    )


def _table(ranked: Sequence[PlacedEncoder]) -> str:
    head = f"{'encoder':10}{'step':>12}{'bubble':>9}{'slowest rank':>14}{'memory':>12}"
    return "\n".join(
        [
            head,
            *(
                f"{each.run.plan.encoder:10}{seconds_text(each.prediction.step_s):>12}{each.prediction.bubble:>9.1%}"
                f"{each.unevenness:>13.2f}x{bytes_text(each.prediction.memory_bytes):>12}"
                for each in ranked
            ),
        ]
    )
