"""A budget of memory: its bytes, and what each unit keeps of each microbatch within it."""

from __future__ import annotations

import re

from superstep.errors import ConfigError
from superstep.plan.config import Kept, Place, PlanConfig, RunConfig
from superstep.plan.model.outline import Outline

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})|0")

KeptChoices = tuple[tuple[Kept, ...], ...]
"""For each unit what it keeps of each microbatch."""


def find_budget(plan: PlanConfig) -> int | None:
    """The most bytes of a rank's tensors; None where nothing is set. Raises ConfigError: no size, or 0."""
    if plan.memory is None:
        return None
    match = _SIZE.fullmatch(plan.memory.strip())
    if match is None:
        raise ConfigError(
            f"plan.memory = '{plan.memory}' is no size; write a number and one of {list(UNITS)}, such as '6GiB'."
        )
    size = int(float(match[1] or 0) * UNITS.get(match[2], 1))
    if size == 0:
        raise ConfigError(
            f"plan.memory = '{plan.memory}' leaves no room for anything: it is a limit; leave it out for none."
        )
    return size


def find_kept(config: RunConfig, outline: Outline, microbatches: int) -> KeptChoices:
    """What each unit keeps of each microbatch; () where the policy decides, or nothing is decided yet.

    Raises:
        ConfigError: no budget to decide within, or choices that are not of these units and microbatches.
    """
    plan = config.plan
    has_budget = find_budget(plan) is not None
    if plan.recompute != "auto":
        if plan.kept is not None:
            raise ConfigError(
                f"plan.kept with plan.recompute = '{plan.recompute}': only 'auto' differs by unit and microbatch; set "
                "plan.recompute to 'auto', or leave plan.kept out."
            )
        return ()
    if not has_budget:
        raise ConfigError(
            "plan.recompute = 'auto' needs a limit to stay within; set plan.memory to one such as '6GiB', or "
            "plan.recompute to 'none', 'selective' or 'full'."
        )
    if config.phases is not None:
        raise ConfigError(
            "plan.recompute = 'auto' with [phases]: each phase has a program of its own; set plan.recompute to 'none', "
            "'selective' or 'full'."
        )
    place = find_place(plan)
    if plan.kept is None:
        return ()
    if len(plan.kept) != len(outline.names):
        raise ConfigError(
            f"plan.kept has {len(plan.kept)} entries and the model {len(outline.names)} units; give one for each, or "
            "leave it out."
        )
    return tuple(
        _read_choices(unit, entry, microbatches, list_choices(place, can_recompute=can_recompute))
        for unit, entry, can_recompute in zip(outline.names, plan.kept, outline.recomputed, strict=True)
    )


def list_choices(place: Place, *, can_recompute: bool) -> tuple[Kept, ...]:
    """What a unit may keep of a microbatch, given the place beside the device."""
    less: tuple[Kept, ...] = ("selective", "input") if can_recompute else ()
    away: tuple[Kept, ...] = () if place == "device" else (place,)
    return ("all", *less, *away)


def find_place(plan: PlanConfig) -> Place:
    """Where units may keep something beside the device. Raises ConfigError: more than one place."""
    places = plan.activations or ("device",)
    if len(places) > 1:
        raise ConfigError(
            f"plan.activations = {list(places)} with plan.recompute = 'auto', which chooses for each unit; give one "
            "place."
        )
    return places[0]


def _read_choices(unit: str, entry: str, microbatches: int, choices: tuple[Kept, ...]) -> tuple[Kept, ...]:
    words = entry.split()
    if len(words) == 1:
        words *= microbatches
    if len(words) != microbatches:
        raise ConfigError(
            f"plan.kept of {unit} has {len(words)} choices and a step {microbatches} microbatches; give one for each, "
            "or one for all."
        )
    known: dict[str, Kept] = {choice: choice for choice in choices}
    if unknown := [word for word in words if word not in known]:
        raise ConfigError(f"plan.kept of {unit} has '{unknown[0]}'; choose one of {list(choices)}.")
    return tuple(known[word] for word in words)


def write_kept(kept: KeptChoices) -> tuple[str, ...]:
    """The text of choices in a configuration."""
    return tuple(own[0] if len(set(own)) == 1 else " ".join(own) for own in kept)
