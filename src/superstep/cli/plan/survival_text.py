"""What failures make of the best plan, as a person reads it."""

from __future__ import annotations

from superstep.observe.number_format import bytes_text, seconds_text
from superstep.planner.failure_cost import Survival


def survival_text(found: Survival | None, chip: str) -> str:
    """How often something fails, how often to keep the state, and how much of the time is then of use."""
    if found is None:
        return f"How often a {chip} fails, nobody has published: --mtbf gives the hours between failures of one.\n"
    every, mtbf = found.steps, found.hazard.mtbf_s
    lines = [
        f"Failures, for the first: one of the chips fails every {_long(mtbf)}; {found.hazard.memory_share:.0%} of them "
        "leave the host's memory.",
        f"  with snapshots     state.snapshot_every = {every(found.kept.snapshot_s)}, state.save_every = "
        f"{every(found.kept.save_s)}: {found.ettr:.2%} of the time makes headway",
        f"  without            state.save_every = {every(found.plain.save_s)}, which training waits for: "
        f"{found.plain_ettr:.2%}",
        f"  A snapshot takes {seconds_text(found.copy_s)} beside the step, a checkpoint of "
        f"{bytes_text(found.state_bytes)} {seconds_text(found.flush_s)}, a restart "
        f"{seconds_text(found.hazard.noticed_s + found.hazard.started_s)}.",
    ]
    return "\n".join(lines) + "\n"


def survival_record(found: Survival | None) -> dict[str, float] | None:
    """The same as JSON has it, in base units."""
    if found is None:
        return None
    return {
        "mtbf_s": found.hazard.mtbf_s,
        "copy_s": found.copy_s,
        "flush_s": found.flush_s,
        "state_bytes": found.state_bytes,
        "snapshot_every": found.steps(found.kept.snapshot_s),
        "save_every": found.steps(found.kept.save_s),
        "ettr": found.ettr,
        "plain_save_every": found.steps(found.plain.save_s),
        "plain_ettr": found.plain_ettr,
    }


def _long(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.3g} days" if hours >= 48 else f"{hours:.3g} hours" if hours >= 2 else f"{60 * hours:.3g} min"
