"""Plans for tests: named ones, and a hypothesis strategy over all that resolve."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.plan.config import LoraConfig, ModelConfig, PlanConfig, RunConfig, Schedule, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import Plan, resolve
from superstep.program.check import check
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Program
from superstep.program.text import read_program, write_program

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
DEGREES = {"dp": [1, 1, 2, 3, 4], "cp": [1, 1, 2], "tp": [1, 2]}


def examples(count: int) -> settings:
    """That many examples, however slow: a busy machine is no fault of the program."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def compile_and_check(plan: Plan) -> Program:
    """A plan's step program: it and that of an evaluation keep the rules, it is read as it is written, and it runs."""
    program = compile_step(plan)
    check(program)
    check(compile_evaluation(plan))
    assert read_program(write_program(program)) == program
    simulate(program, PerUnit(units=(UnitSeconds(forward_s=1.0, backward_s=2.0, transfer_s=0.1),) * len(plan.units)))
    return program


def plan_of(
    *,
    layers: int = 4,
    microbatches: int = 4,
    tied: bool = False,
    experts: int | None = None,
    lora: LoraConfig | None = None,
    snapshot_every: int | None = None,
    **layout: Any,
) -> Plan:
    """The plan of a small model; ``layout`` are fields of PlanConfig.

    Its head has little work, so that stages are even in blocks where nothing is said.
    """
    layout.setdefault("microbatch", 1)
    batch = microbatches * layout.get("dp", 1) * layout["microbatch"]
    config = RunConfig(
        model=ModelConfig(name="demo", layers=layers, tied=tied, vocab=16, experts=experts),
        train=TrainConfig(batch_sequences=batch),
        plan=PlanConfig(**layout),
        lora=lora,
        state=StateConfig(snapshot_every=snapshot_every),
    )
    return resolve(config).plan


@st.composite
def splits(draw: st.DrawFn, units: int, stages: int) -> tuple[int, ...]:
    """Any way to share out the units."""
    cuts = draw(st.lists(st.integers(1, units - 1), min_size=stages - 1, max_size=stages - 1, unique=True))
    ends = [0, *sorted(cuts), units]
    return tuple(b - a for a, b in pairwise(ends))


@st.composite
def plans(draw: st.DrawFn, **fixed: Any) -> Plan:
    """Any plan of up to 4 pipeline ranks (now and then 8); ``fixed`` fields are not drawn."""

    def pick(name: str, values: st.SearchStrategy[Any]) -> Any:
        return fixed[name] if name in fixed else draw(values)

    pp = pick("pp", st.sampled_from([1, 1, 2, 2, 3, 4, 4, 8]))
    schedule = pick("schedule", st.sampled_from(SCHEDULES))
    is_grouped = schedule in ("interleaved", "breadth-first")
    most = 3 if is_grouped and pp <= 4 else 1
    chunks = pick("chunks", st.just(2) if schedule == "zb-v" else st.integers(1, most))
    least = pp if chunks > 1 else 1
    group = pick("microbatch_group", st.integers(least, least + 2)) if is_grouped else None
    layers = pick("layers", st.integers(pp * chunks, pp * chunks + 3))
    dp, cp, tp = (pick(axis, st.sampled_from(degrees)) for axis, degrees in DEGREES.items())
    zero = pick("zero", st.integers(0, 3))
    ep = pick("ep", st.sampled_from([n for n in (1, 2, 4) if dp * cp * tp % n == 0]))
    experts = pick("experts", st.none() | st.just(4) if ep == 1 else st.just(4))
    alike = [dp * cp] if experts is None else [dp * cp, dp * cp * tp // ep]
    copies = [n for n in range(1, dp * cp) if all(count % n == 0 for count in alike)] if zero else []
    return plan_of(
        layers=layers,
        stages=pick("stages", st.none() | splits(layers + 2, pp * chunks)),
        microbatches=pick("microbatches", st.integers(1, 8) if group is None else st.integers(1, 3).map(group.__mul__)),
        tied=pick("tied", st.booleans()),
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep,
        experts=experts,
        lora=pick("lora", st.none() | st.just(LoraConfig())) if experts is None else None,
        zero=zero,
        replicas=pick("replicas", st.sampled_from(copies or [1])),
        schedule=schedule,
        chunks=chunks,
        microbatch_group=group,
        recompute=pick("recompute", st.sampled_from(["none", "selective", "full"])),
        prefetch=pick("prefetch", st.integers(0, 3)),
    )
