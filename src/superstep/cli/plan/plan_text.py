"""Plans for display: a table of the best, the cost of each axis, where the time and the memory go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from superstep.cost.closed.uncertainty import SHARE, UNSEEN_PEAKS, UNSEEN_STEPS
from superstep.cost.program.flops import MFU_CONVENTION, parameters
from superstep.cost.program.memory.memory import RankBytes
from superstep.cost.program.memory.snapshot_memory import slots_bytes
from superstep.cost.program.time.stragglers import Jitter, StragglerResult
from superstep.observe.number_format import bytes_text, count_text, seconds_text
from superstep.planner.calibration.calibrate import Calibration
from superstep.planner.calibration.calibrate_observation import Guide
from superstep.planner.plan_summary import Figures, limits, list_carried_bytes, scale_interval, shares
from superstep.planner.search import SearchResult
from superstep.planner.search_problem import SearchProblem
from superstep.planner.sensitivity import Fallback, Neighbour
from superstep.planner.simulate_best import SimulatedPlan
from superstep.planner.tie_break import TIE, tie_places
from superstep.run.reports.plan_line import plan_text

BAR = 40
"""Columns of a whole step."""
SHOWN, MOST_SHOWN = 0.01, 6
"""Smallest change of a constant that is shown, and the most changes."""


def header(problem: SearchProblem, answer: SearchResult) -> str:
    """The planned model and cluster, and the size of the search."""
    cluster, config = problem.cluster, problem.base
    return (
        f"{config.model.name} ({count_text(parameters(problem.shape))} parameters) on {cluster.chips} x "
        f"{cluster.chip.name}, {min(cluster.domain, cluster.chips)} to a domain; {problem.batch_sequences} x "
        f"{problem.sequence_tokens} tokens a step, {bytes_text(problem.memory_bytes)} a chip\npriced for Superstep: "
        f"eager kernels, a loss in chunks, one collective a unit, gradients summed in fp32\n{count_text(answer.plans)} "
        f"plans; {count_text(answer.priced)} were priced, bounds exclude the others\n"
    )


def table(plans: Sequence[SimulatedPlan], figures: Sequence[Figures]) -> str:
    """The best plans, a line for each and one below it with its bottleneck."""
    has_run = figures[0].run_s is not None
    lines = [f"{'':3}{'step':>9}{'tokens/s':>10}{'MFU':>7}{'memory':>11}{'headroom':>11}  plan"]
    for number, (plan, each) in enumerate(zip(plans, figures, strict=True), 1):
        lines.append(
            f"{number:<3}{seconds_text(each.step_s):>9}{count_text(each.tokens_per_s):>10}{each.mfu:>7.1%}"
            f"{bytes_text(each.memory_bytes):>11}{bytes_text(each.headroom_bytes):>11}  {_layout(plan)}"
        )
        lines.append(f"   {_near(each)}; {_limits(plan)}")
        lines += [f"   {_run_text(each)}"] if has_run else []
    lines.append(
        f"Ranges held {SHARE:.0%} of published steps and peaks whose software and cluster were left out of the fit, "
        f"and {UNSEEN_STEPS:.0%} and {UNSEEN_PEAKS:.0%} of ones from software and chips that were new."
    )
    lines += _ties_text(plans)
    lines.append(snapshot_line(plans[0]))
    lines.append(f"MFU: {MFU_CONVENTION}; against the chip's published dense peak.")
    if not all(plan.is_simulated for plan in plans):
        is_ours = not plans[0].run.shape.is_priced_only
        why = (
            "the program is too long to simulate here" if is_ours else "this model is priced, but cannot be trained yet"
        )
        lines.append(f"* by closed form: {why}.")
    return "\n".join(lines) + "\n"


def snapshot_line(plan: SimulatedPlan) -> str:
    """The hosts' memory for snapshots."""
    cluster, of_rank = plan.priced.side.problem.cluster, slots_bytes(plan.run)
    node = min(cluster.domain, cluster.chips)
    return (
        f"Snapshots of plan 1 (state.snapshot_every): up to {bytes_text(of_rank)} of the host's memory for each "
        f"chip, {bytes_text(node * of_rank)} for {node}."
    )


def _layout(plan: SimulatedPlan) -> str:
    full, config = plan.run.plan, plan.run.config.plan
    words = [plan_text(plan.run)]
    words += [f"group={config.microbatch_group}"] if config.microbatch_group else []
    words += [f"recompute={full.recompute}"] if full.recompute != "none" else []
    words += ["no-sp"] if full.mesh.tp > 1 and not full.sequence_parallel else []
    words += [] if plan.is_simulated else ["*"]
    return " ".join(words)


def _limits(plan: SimulatedPlan) -> str:
    return "limited by " + ", ".join(f"{name} ({share:.0%})" for name, share in limits(plan))


def _near(each: Figures) -> str:
    seconds, held = each.step_interval_s, each.memory_interval_bytes
    return f"{seconds_text(seconds[0])} to {seconds_text(seconds[1])}, {bytes_text(held[0])} to {bytes_text(held[1])}"


def _run_text(each: Figures) -> str:
    assert each.run_s is not None
    assert each.run_interval_s is not None
    low, high = scale_interval(each.run_interval_s, 1 / 86400)
    words = [f"{each.run_s / 86400:.3g} days ({low:.3g} to {high:.3g})"]
    words += [f"{each.energy_j / 3.6e9:.3g} MWh"] if each.energy_j is not None else []
    if each.price is not None and each.price_interval is not None:
        words.append(f"price {each.price:,.0f} ({each.price_interval[0]:,.0f} to {each.price_interval[1]:,.0f})")
    return ", ".join(words)


def _ties_text(plans: Sequence[SimulatedPlan]) -> list[str]:
    """The shown plans that the formulas cannot distinguish from the first."""
    near = tie_places([each.step_s for each in plans])
    if 0 not in near or len(near) == 1:
        return []
    others = ", ".join(str(place + 1) for place in near if place)
    others += " is" if len(near) == 2 else " are"
    return [
        f"Ties: {others} within {TIE:.0%} of 1, a difference that no formula can predict; of these, 1 is the simplest."
    ]


def alternatives_text(neighbours: Sequence[Neighbour]) -> str:
    """The value of each axis."""
    lines = ["Nearest alternatives to plan 1, the best of each kind:"]
    for each in sorted(neighbours, key=lambda n: n.slower):
        memory = "the same memory"
        if abs(each.spared_bytes) >= 1:
            amount = bytes_text(abs(each.spared_bytes))
            memory = f"spares {amount}" if each.spared_bytes > 0 else f"takes {amount} more"
        value = str(each.value).lower() if isinstance(each.value, bool) else each.value
        speed = f"{abs(each.slower):.1%} {'slower' if each.slower >= 0 else 'faster'}"
        lines.append(f"  {f'{each.field} = {value}':28}{f'{speed}, {memory}':36}{_layout(each.plan)}")
    return "\n".join(lines) + "\n"


def calibration_text(calibration: Calibration, source: str) -> str:
    """The effect of a recorded step."""
    lines = [
        f"Calibrated on {source}: an instruction is predicted within {calibration.error_after:.0%} in the median, "
        f"{calibration.error_before:.0%} before"
    ]
    lines += [f"  {each.name:26}{each.before:>10.3g} -> {each.after:.3g}" for each in calibration.changes]
    if calibration.foreign:
        names = " and ".join(each.name for each in calibration.foreign)
        lines.append(
            f"Not used: {names} would change by an implausible factor; the run used other chips, or other programs "
            "used them too."
        )
    elif not calibration.is_believed:
        lines.append("Not used: the old constants are as close.")
    return "\n".join(lines) + "\n"


def write_published(source: str, before: Guide, after: Guide, ratio: float, *, is_used: bool) -> str:
    """The effect of a published step, and its prediction error."""
    off = f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'}"
    if not is_used:
        return f"Not used: {source}, whose step was predicted {off} than it was; see whether its plan is right.\n"
    return f"Calibrated on {source}: its step was predicted {off} than it was\n{_moves_text(before, after)}"


def write_measured(source: str, before: Guide, after: Guide) -> str:
    """The effect of a measured machine."""
    return f"Calibrated on {source}, a measured machine\n{_moves_text(before, after)}"


def _moves_text(before: Guide, after: Guide) -> str:
    """The changed constants, the largest change first."""
    moves = [(name, before.efficiency[name], value) for name, value in after.efficiency.values.items()]
    far = sorted((move for move in moves if abs(move[2] / move[1] - 1) > SHOWN), key=lambda m: -abs(m[2] / m[1] - 1))
    return "".join(f"  {name:26}{was:>10.3g} -> {now:.3g}\n" for name, was, now in far[:MOST_SHOWN])


def write_narrowed(narrowed: float) -> str:
    """How much narrower the first plan's range is."""
    return f"Calibration narrows the range of plan 1's step to {narrowed:.0%} of the width.\n"


def explanation(plan: SimulatedPlan) -> str:
    """The waterfall of a step, and its memory by category."""
    lines = ["Step time of plan 1, on its busiest pipeline rank:"]
    lines += _bars({name: share * plan.step_s for name, share in shares(plan).items()}, seconds_text)
    lines += ["", "Memory of plan 1, on its fullest rank:"]
    lines += _bars(dict(_memory(plan)), bytes_text)
    carried = list_carried_bytes(plan)
    if carried:
        lines += ["", "Bytes that a rank of the busiest pipeline rank sends or sums in a step, by axis:"]
        lines += [f"  {each.axis:26}{bytes_text(each.bytes):>10}  over the {each.link}" for each in carried]
    return "\n".join(lines) + "\n"


def _memory(plan: SimulatedPlan) -> Iterator[tuple[str, float]]:
    yield "more communicators", plan.communicators_bytes
    if plan.memory is None:
        held = plan.priced.side.pricing.predict_memory(plan.priced.plan)
        for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace"):
            yield name, float(getattr(held, name).reshape(-1)[0])
        return
    exact: RankBytes = plan.memory
    yield "parameters", exact.params
    yield "gradients", exact.gradients
    yield "optimizer", exact.optimizer
    yield "gathered parameters", exact.peak.params_bytes
    yield "unsettled gradients", exact.peak.gradient_bytes
    yield "activations", exact.peak.kept_bytes
    yield "between units", exact.peak.boundary_bytes
    yield "workspace", exact.peak.workspace_bytes
    yield "batch", exact.batch
    yield "lost between tensors", plan.memory_bytes - plan.communicators_bytes - exact.bytes


def _bars(values: dict[str, float], text: Any) -> list[str]:  # noqa: ANN401
    """A line for each value; its bar starts at the end of the one before."""
    total, before = sum(values.values()), 0.0
    lines = []
    for name, value in values.items():
        start, end = (round(at / total * BAR) for at in (before, before + value))
        before += value
        if value > 0:
            bar = " " * start + "#" * max(end - start, 1)
            lines.append(f"  {name:26}{text(value):>10}{value / total:>7.1%}  {bar}")
    return lines


def fallback_text(fallbacks: Sequence[Fallback]) -> str:
    """Plans for the remaining nodes after a loss."""
    lines = ["Plans after the loss of nodes, with the same global batch; each is resolved, compiled and simulated:"]
    for each in fallbacks:
        if each.verified is None:
            lines.append(f"  -{each.lost}: no plan fits on the remaining nodes")
        else:
            lines.append(
                f"  -{each.lost}: {each.chips} chips, {seconds_text(each.verified.step_s)} a step, "
                f"{bytes_text(each.verified.memory_bytes)}  {_layout(each.verified)}"
            )
    return "\n".join(lines) + "\n"


def jitter_text(straggled: StragglerResult | None, jitter: Jitter) -> str:
    """Delays of steps when chips differ."""
    if straggled is None:
        return "The program of the best plan is too long to sample stragglers.\n"
    # Rounding may leave a hair less than the clean step; no step is faster than that.
    mean, late = (max(each / straggled.clean_s - 1, 0.0) for each in (straggled.mean_s, straggled.late_s))
    slow = f", {jitter.slow_share:.1%} of the chips a tenth slower" if jitter.slow_share else ""
    return (
        f"With operations spread by {jitter.spread:.1%}{slow}: the step of the first takes {mean:.1%} longer in the "
        f"mean, and one in twenty {late:.1%} or more.\n"
    )


def record(
    answer: SearchResult, plans: Sequence[SimulatedPlan], figures: Sequence[Figures], beside: Sequence[Neighbour]
) -> dict[str, Any]:
    """The problem, the best plans and their alternatives for JSON, in base units."""
    problem = plans[0].priced.side.problem
    return {
        "model": problem.base.model.name,
        "chip": problem.cluster.chip.name,
        "chips": problem.cluster.chips,
        "batch_sequences": problem.batch_sequences,
        "sequence_tokens": problem.sequence_tokens,
        "memory_bytes": problem.memory_bytes,
        "plans": answer.plans,
        "priced": answer.priced,
        "too_large": answer.too_large,
        "best": [
            {
                "plan": asdict(plan.run.config.plan),
                "compute": plan.run.config.numerics.compute,
                "is_simulated": plan.is_simulated,
                "snapshot_bytes": slots_bytes(plan.run),
                "figures": asdict(each),
                "shares": shares(plan),
            }
            for plan, each in zip(plans, figures, strict=True)
        ],
        "alternatives": [
            {
                "field": each.field,
                "plan": asdict(each.plan.run.config.plan),
                "slower": each.slower,
                "spared_bytes": each.spared_bytes,
            }
            for each in beside
        ],
    }
