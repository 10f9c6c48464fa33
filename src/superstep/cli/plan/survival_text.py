"""The effect of failures on the best plan, for display."""

from __future__ import annotations

from superstep.observe.number_format import bytes_text, seconds_text
from superstep.planner.failure_cost import FailureCost


def survival_text(survival: FailureCost | None, chip: str) -> str:
    """How often something fails, how often to save the state, and the remaining share of useful time."""
    if survival is None:
        return (
            f"The failure rate of a {chip} is not published: set the hours between failures of one chip with --mtbf.\n"
        )
    every, mtbf = survival.steps, survival.hazard.mtbf_s
    lines = [
        f"Failures of plan 1: one of the chips fails every {_long(mtbf)}; {survival.hazard.memory_share:.0%} of "
        "them leave the host's memory.",
        f"  with snapshots     state.snapshot_every = {every(survival.kept.snapshot_s)}, state.save_every = "
        f"{every(survival.kept.save_s)}: {survival.ettr:.2%} of the time advances the run",
        f"  without            state.save_every = {every(survival.plain.save_s)}, which training waits for: "
        f"{survival.plain_ettr:.2%}",
        f"  A snapshot takes {seconds_text(survival.copy_s)} beside the step, a checkpoint of "
        f"{bytes_text(survival.state_bytes)} {seconds_text(survival.flush_s)}, a restart "
        f"{seconds_text(survival.hazard.noticed_s + survival.hazard.started_s)}.",
    ]
    return "\n".join(lines) + "\n"


def survival_record(survival: FailureCost | None) -> dict[str, float] | None:
    """The same for JSON, in base units."""
    if survival is None:
        return None
    return {
        "mtbf_s": survival.hazard.mtbf_s,
        "copy_s": survival.copy_s,
        "flush_s": survival.flush_s,
        "state_bytes": survival.state_bytes,
        "snapshot_every": survival.steps(survival.kept.snapshot_s),
        "save_every": survival.steps(survival.kept.save_s),
        "ettr": survival.ettr,
        "plain_save_every": survival.steps(survival.plain.save_s),
        "plain_ettr": survival.plain_ettr,
    }


def _long(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.3g} days" if hours >= 48 else f"{hours:.3g} hours" if hours >= 2 else f"{60 * hours:.3g} min"
