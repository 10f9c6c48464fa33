"""The points that events add to curves, by their names in every tracker: train/loss, speed/step_s, ..."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.observe.events import Evaluated, Event, LossDetails, RolloutStats, RouterStats, StepDone
from superstep.observe.router_balance import busiest, share_dropped


@dataclass(frozen=True, slots=True)
class Scalars:
    """Points of one step, by name; ``step`` counts finished steps."""

    step: int
    points: dict[str, float]


def scalars(event: Event) -> Scalars | None:
    """The points of an event; None for an event without any."""
    match event:
        case StepDone() | LossDetails() | RouterStats() | RolloutStats() | Evaluated():
            return Scalars(event.step, _points(event))
        case _:
            return None


def _points(event: StepDone | LossDetails | RouterStats | RolloutStats | Evaluated) -> dict[str, float]:
    match event:
        case StepDone():
            points = {
                "train/loss": event.loss,
                "train/lr": event.lr,
                "train/grad_norm": event.grad_norm,
                f"train/{event.counts}_seen": event.tokens_seen,
                f"speed/{event.counts}_per_s": event.tokens_per_s,
                "speed/step_s": event.step_s,
                "speed/data_s": event.data_s,
                "memory/peak_bytes": event.memory_bytes,
            }
            return points if event.mfu is None else points | {"speed/mfu": event.mfu}
        case LossDetails():
            return {f"loss/{name}": value for name, value in zip(event.names, event.values, strict=True)}
        case RouterStats():
            points = {
                "router/dropped_share": share_dropped(sum(event.chosen, ()), sum(event.dropped, ())),
                "router/balance": sum(event.balance) / len(event.balance),
                "router/z": sum(event.z) / len(event.z),
            }
            return points | {f"router_busiest/layer_{i}": busiest(row) for i, row in enumerate(event.chosen)}
        case RolloutStats():
            points = {
                "rollouts/reward": event.reward,
                "rollouts/cut_share": event.cut / max(1, event.answers + event.lost),
                "rollouts/lost": event.lost,
                "rollouts/uniform_groups": event.uniform,
                "rollouts/lag": event.lag,
                "rollouts/drawn_tokens_per_s": event.drawn_tokens / max(event.seconds, 1e-9),
            }
            return points | {f"policy/{name}": value for name, value in event.measures.items()}
        case Evaluated():
            points = {"validation/loss": event.loss}
            further = {"bits_per_byte": event.bits_per_byte, "accuracy": event.accuracy}
            return points | {f"validation/{name}": value for name, value in further.items() if value is not None}
