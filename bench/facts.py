"""Published facts beside ours: memory of ZeRO and of activations, bubbles of schedules.

    python -m bench.facts              one table: fact, published, ours, difference
    python -m bench.facts --quick      without programs of more than 5,000 passes

Formulas are those of ``cost.closed.memory``; bubbles are those of Superstep's own programs, compiled and put on a
clock.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache

import numpy as np

from bench.published_rows import DATA
from superstep.cost.closed.activations import LayerBytes, dense_layer
from superstep.cost.closed.framework import Software, price_of
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.framework_memory import megatron
from superstep.cost.closed.memory import Footprint, footprint
from superstep.cost.closed.model_numbers import DecoderNumbers, array
from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES, Layout
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.hardware.catalogue import chip
from superstep.hardware.network import usual_cluster
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, Schedule, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step

GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class Fact:
    """A published number, ours, and how far they may be apart."""

    name: str
    published: float
    ours: float
    tolerance: float

    @property
    def is_held(self) -> bool:
        """Whether ours is within the tolerance."""
        return abs(self.ours - self.published) <= self.tolerance


def facts(*, most_passes: float = math.inf) -> Iterator[Fact]:
    """All of them, but for bubbles of programs of more passes than that."""
    with (DATA / "facts.csv").open(newline="", encoding="utf-8") as file:
        published = {row["fact_id"]: row["value"] for row in csv.DictReader(file)}
    yield from zero(published)
    yield from activations()
    yield from figures(published)
    yield from bubbles()
    yield from zero_bubbles(published, most_passes=most_passes)


STAGES = {"os": 1, "os+g": 2, "os+g+p": 3}


def zero(published: dict[str, str]) -> Iterator[Fact]:
    """Rajbhandari 2020, table 1: GB of model states in 16 bits with fp32 Adam; printed digits are cut, not rounded."""
    for name, printed in published.items():
        parts = name.split("-")
        if parts[0] != "zero" or len(parts) != 4 or parts[2] not in STAGES:
            continue
        count = float(parts[1].rstrip("BT")) * (1e12 if parts[1].endswith("T") else 1e9)
        model = decoder(vocab=count, tied=1.0, layers=1.0, width=1.0)
        ranks = float(parts[3])
        plan = layout(dp=ranks, shards=ranks, zero=float(STAGES[parts[2]]))
        ours = float(footprint(model, plan, classic(kept_gradient_bytes=2.0), megatron()).lasting) / 1e9
        digits = len(printed.partition(".")[2])
        yield Fact(name, float(printed), ours, 10.0**-digits)


@dataclass(frozen=True, slots=True)
class Gpt:
    """A model of Korthikanti 2022, table 3, and how it was split there."""

    heads: float
    width: float
    layers: float
    pipeline: float
    chunks: float
    batch: float


MODELS = {
    "22B": Gpt(64, 6144, 48, 1, 1, 4),
    "175B": Gpt(96, 12288, 96, 8, 3, 1),
    "530B": Gpt(128, 20480, 105, 35, 3, 1),
    "1T": Gpt(160, 25600, 128, 64, 1, 1),
}
SPLIT = 8.0
SEQUENCE = 2048.0


def activations() -> Iterator[Fact]:
    """Korthikanti 2022, eq. 1 to 6 and sec. 4.2.3 and 5, by formula."""
    for name, gpt in MODELS.items():
        a, h, t = gpt.heads, gpt.width, SPLIT
        unit, scores = SEQUENCE * gpt.batch * h, 5 * a * SEQUENCE / h
        alone, cut, split = (layer(gpt, tp, is_split) for tp, is_split in ((1.0, False), (t, False), (t, True)))
        for fact, published, ours in (
            ("act-1", unit * (34 + scores), alone.whole),
            ("act-2 tp", unit * (10 + 24 / t + scores / t), cut.whole),
            ("act-2 tp sp", unit / t * (34 + scores), split.whole),
            ("act-2 tp sp selective", 34 * unit / t, split.selective),
            ("act-2 full", 2 * unit, cut.boundary),
        ):
            yield Fact(f"{fact} {name}", published / 1e9, float(ours) / 1e9, published * 1e-12)
        p, v = gpt.pipeline, gpt.chunks
        if p > 1 and v > 1:
            plain, looped = (held(gpt, chunks, is_split=True, recompute="none").activations for chunks in (1.0, v))
            yield Fact(f"act-3 {name}", 1 + (p - 1) / (p * v), float(looped / plain), 1e-9)
    for name, published in (("175B", 70.0), ("530B", 65.0)):
        found = layer(MODELS[name], SPLIT, is_split=True)
        yield Fact(f"act-4 {name}", published, 100 * float(1 - found.selective / found.whole), 0.5)


def figures(published: dict[str, str]) -> Iterator[Fact]:
    """Korthikanti 2022, fig. 1 and 7, as Calculon's authors read them: without embedding and head."""
    for name, gpt in MODELS.items():
        cut, split = layer(gpt, SPLIT, is_split=False), layer(gpt, SPLIT, is_split=True)
        for kind, ours in (
            ("none", cut.whole),
            ("seq", split.whole),
            ("sel", cut.selective),
            ("seqsel", split.selective),
            ("full", cut.boundary),
        ):
            fact = f"actmem-{name}-{kind}"
            yield Fact(fact, float(published[fact]), 100 * float(ours / cut.whole), 0.15)
        whole = held(gpt, gpt.chunks, is_split=False, recompute="none")
        few = held(gpt, gpt.chunks, is_split=True, recompute="selective")
        for kind, value in (
            ("param+grad+optimizer/GPU", whole.lasting),
            ("activationspute", whole.activations),
            ("activationstive", few.activations),
        ):
            fact = f"mem1-{name}-{kind}"
            read = float(published[fact])
            # The masks of the embedding's dropout, and what the last norm keeps, are not in the figure's reading.
            yield Fact(fact, read, float(value) / GIB, 0.025 * read)


def bubbles() -> Iterator[Fact]:
    """Bubbles in passes that take the same time; as shares of the ideal time, then of the whole (bubble-1 to -4)."""
    for p, m, v in ((4, 16, 2), (8, 32, 3), (8, 64, 2)):
        ideal = (p - 1) / m
        yield Fact(f"bubble-1 1f1b p={p} m={m}", ideal, over_ideal(bubble("1f1b", p, m)), 1e-9)
        yield Fact(f"bubble-1 gpipe p={p} m={m}", ideal, over_ideal(bubble("gpipe", p, m)), 1e-9)
        looped = bubble("interleaved", p, m, chunks=v)
        yield Fact(f"bubble-2 p={p} m={m} v={v}", ideal / v, over_ideal(looped), 1e-9)
        yield Fact(f"bubble-3 1f1b p={p} m={m}", (p - 1) / (m + p - 1), bubble("1f1b", p, m), 1e-9)
        yield Fact(f"bubble-3 interleaved p={p} m={m} v={v}", (p - 1) / (m * v + p - 1), looped, 1e-9)
        # Put there as a third of 1F1B's; of a step so much shorter it is a little more.
        third = (p - 1) / (3 * (m + p - 1))
        yield Fact(f"bubble-3 zb1p p={p} m={m}", third, bubble("zb-h1", p, m), 0.01)
        yield Fact(f"bubble-3 zbv p={p} m={m}", (p - 1) / (p - 1 + 6 * m), bubble("zb-v", p, m, chunks=2), 0.01)
    yield Fact("bubble-4 M=4K", 3 / (4 * 4 + 3), bubble("gpipe", 4, 16), 1e-9)


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of one stage's passes and of a transfer, as profiled by the authors of the zero-bubble paper.

    Qi 2023 (arXiv:2401.10241), appendix; they reproduce the paper's bubble rates of 1F1B and ZB-H1 to four digits at
    the first number of microbatches of each model.
    """

    p: int
    forward: float
    inputs: float
    weights: float
    transfer: float
    chunks: int

    @property
    def all(self) -> float:
        """Of one microbatch."""
        return self.forward + self.inputs + self.weights


PROFILES = {
    "1.5B": Profile(8, 18.522, 18.086, 9.337, 0.601, 3),
    "6.2B": Profile(8, 29.718, 29.444, 19.927, 0.527, 4),
    "14.6B": Profile(16, 11.347, 11.248, 8.132, 0.377, 3),
    "28.3B": Profile(32, 10.419, 10.207, 7.715, 0.408, 2),
}
SCHEDULED: dict[str, Schedule] = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-1p": "zb-h1"}


def zero_bubbles(published: dict[str, str], *, most_passes: float = math.inf) -> Iterator[Fact]:
    """Qi 2023, table 5. ZB-1p finds ZB-H1; ZB-H2 and ZB-2p are closed forms, for no program of ours is of them."""
    for name, printed in published.items():
        if not name.startswith("zb5-"):
            continue
        kind, size, count = name[4:].rsplit("-", 2)
        profile, m = PROFILES[size], int(count)
        if kind in SCHEDULED:
            chunks = profile.chunks if kind == "1F1B-I" else 1
            if 3 * profile.p * chunks * m > most_passes:
                continue
            ours = bubble(SCHEDULED[kind], profile.p, m, chunks=chunks, profile=profile)
        else:
            each = profile.forward + profile.inputs - 2 * profile.weights if kind == "ZB-H2" else 0.0
            waits = (profile.p - 1) * (each + 2 * profile.transfer)
            ours = waits / (m * profile.all + waits)
        yield Fact(name, float(printed), ours, 0.01)


EVEN = Profile(0, 1.0, 1.0, 1.0, 0.0, 1)


@cache
def bubble(schedule: Schedule, p: int, m: int, *, chunks: int = 1, profile: Profile = EVEN) -> float:
    """Share of a step in which a rank waits, of the program that Superstep runs."""
    stages = p * chunks
    config = RunConfig(
        model=ModelConfig(name="demo", layers=stages, vocab=16),
        train=TrainConfig(batch_sequences=m),
        plan=PlanConfig(
            dp=1,
            pp=p,
            chunks=chunks,
            schedule=schedule,
            microbatch=1,
            stages=(2, *[1] * (stages - 2), 2),
        ),
    )
    block = UnitSeconds(
        forward_s=profile.forward / chunks,
        backward_s=(profile.inputs + profile.weights) / chunks,
        weight_s=profile.weights / chunks,
        transfer_s=profile.transfer,
    )
    # Embedding and head ride with the first and the last block, and take no time of their own.
    end = UnitSeconds(forward_s=0.0, backward_s=0.0)
    timeline = simulate(compile_step(resolve(config).plan), PerUnit(units=(end, *[block] * stages, end)))
    return 1 - m * profile.all / max(event.end_s for event in timeline.events)


def over_ideal(share: float) -> float:
    """A share of the whole as one of the time without it."""
    return share / (1 - share)


def decoder(**numbers: float) -> DecoderNumbers:
    """A decoder with these numbers, and zeros."""
    return DecoderNumbers(**{field.name: array(numbers.get(field.name, 0.0)) for field in fields(DecoderNumbers)})


def layout(**numbers: float) -> Layout:
    """A layout with these numbers; every degree else is 1, every choice the first."""
    choices = {"zero", "sequence_parallel", "schedule", "recompute", "offload"}
    needed = [field.name for field in fields(Layout) if field.default is field.default_factory is MISSING]
    usual = {name: float(name not in choices) for name in needed}
    return Layout(**{name: array(value) for name, value in (usual | numbers).items()})


def classic(**numbers: float) -> Stack:
    """Megatron-LM of its time: softmax is fused and kept."""
    software = replace(Software(attention="fused-softmax"), **numbers)
    return price_of(usual_cluster(chip("A100-80GB-SXM"), 8), software)[1]


def gpt_decoder(gpt: Gpt) -> DecoderNumbers:
    """Without its vocabulary."""
    return decoder(
        layers=gpt.layers,
        width=gpt.width,
        heads=gpt.heads,
        kv_heads=gpt.heads,
        head_dim=gpt.width / gpt.heads,
        ffn=4 * gpt.width,
        biases=1.0,
        dropout=1.0,
        sequence_tokens=SEQUENCE,
    )


def layer(gpt: Gpt, tp: float, is_split: bool) -> LayerBytes:
    """One of its layers."""
    plan = layout(tp=tp, sequence_parallel=float(is_split), microbatch=gpt.batch)
    return dense_layer(gpt_decoder(gpt), plan, classic(), megatron())


def held(gpt: Gpt, chunks: float, *, is_split: bool, recompute: str) -> Footprint:
    """Its first stage."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    plan = layout(
        tp=SPLIT,
        pp=gpt.pipeline,
        chunks=chunks,
        schedule=float(SCHEDULES.index(schedule)),
        sequence_parallel=float(is_split),
        recompute=float(RECOMPUTE.index(recompute)),
        microbatch=gpt.batch,
        microbatches=1000.0,
    )
    return footprint(gpt_decoder(gpt), plan, classic(), megatron())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.facts")
    parser.add_argument("--quick", action="store_true")
    found = list(facts(most_passes=5000 if parser.parse_args(argv).quick else math.inf))
    print(f"{'fact':40} {'published':>12} {'ours':>12} {'difference':>11}")
    for fact in found:
        print(
            f"{fact.name:40} {fact.published:12.6g} {fact.ours:12.6g} {fact.ours - fact.published:+11.3g}"
            f"{'' if fact.is_held else '   beyond ' + format(fact.tolerance, '.3g')}"
        )
    rates = [abs(fact.ours - fact.published) for fact in found if fact.name.startswith("zb5-")]
    print(f"{sum(fact.is_held for fact in found)} of {len(found)} facts held;", end=" ")
    print(f"bubble rates of the zero-bubble paper: median {np.median(rates):.4f}, most {max(rates):.4f}")


if __name__ == "__main__":
    main()
