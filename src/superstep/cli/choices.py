"""Automatic choices that the user might not expect, each in one line."""

from __future__ import annotations

from collections.abc import Callable

from superstep.cli.flags.options import YIELDING
from superstep.comm.device import gpus
from superstep.errors import ConfigError
from superstep.hardware.host import cores
from superstep.plan.config import RunConfig
from superstep.plan.resolution.fill_plan import divisors
from superstep.plan.resolution.resolve import Resolved


def describe_changed_layout(proposed: RunConfig, run: Resolved, resolve: Callable[[RunConfig], Resolved]) -> str | None:
    """The fields of a demo or resumed run that flags have changed, and why; None if the layout is the proposed one,
    except for the microbatch size.

    Args:
        proposed: the run before the change.
        run: the resolved run.
        resolve: raises an error for ``proposed`` with the broken rule.
    """
    changed = []
    for name in reversed(YIELDING):
        key = name.removeprefix("plan.")
        before, after = getattr(proposed.plan, key), getattr(run.config.plan, key)
        if before not in (None, after):
            changed.append(f"{name} = {after} (not {before})")
    if all(each.startswith("plan.microbatch ") for each in changed):
        return None
    try:
        resolve(proposed)
    except ConfigError as error:
        return f"{', '.join(changed)}: {error}"
    return None


def idle_places(run: Resolved, places: int, name: str) -> str | None:
    """The message that a plan with an automatic ``dp`` leaves places without a rank, and how to use them; None
    otherwise.

    Args:
        run: the resolved run.
        places: number of places for ranks.
        name: of the places.
    """
    world, dp, batch = run.plan.mesh.world, run.plan.mesh.dp, run.config.train.batch_sequences
    room = places // (world // dp)
    if room <= dp:
        return None
    most = max(degree for degree in divisors(batch) if degree <= room)
    if most > dp:
        mend = f"--plan.dp {most} takes {most * world // dp}"
    else:
        mend = (
            f"train.batch_sequences = {batch} does not split over more ranks; a multiple of {room} does, with "
            f"--plan.dp {room}"
        )
    ranks = "1 rank computes" if world == 1 else f"{world} ranks compute"
    return f"{ranks}, on {world} of {places} {name}; {mend}."


def places_of(run: Resolved) -> tuple[int, str]:
    """Number of places for ranks on this host, and their name."""
    count = 0 if run.config.plan.device == "cpu" else gpus()
    return (count, "GPUs") if count else (cores(), "cores")
