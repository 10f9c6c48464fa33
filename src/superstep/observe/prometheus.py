"""A run's numbers in Prometheus's text format, from metrics.jsonl.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

The standard library suffices here. A server has histograms and uses the client library (``serve.api.metrics``); as
there, names begin with ``superstep:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = (
    ("step", "loss", "train_loss", "Nats per valid token, mean over the newest step's batch."),
    ("step", "grad_norm", "grad_norm", "The global norm of the gradient before clipping."),
    ("step", "lr", "learning_rate", "The learning rate of the newest step."),
    ("step", "tokens_per_s", "{counted}_per_second", "Valid {counted} over the seconds of the newest step."),
    ("step", "step_s", "step_seconds", "The newest step, the wait for its batch included."),
    ("step", "data_s", "data_wait_seconds", "Of these, the wait for the batch."),
    ("step", "mfu", "mfu", "Model FLOPs over peak FLOPs, as a share of 1."),
    ("step", "memory_bytes", "memory_bytes", "The highest peak of any rank so far."),
    ("evaluated", "loss", "validation_loss", "Nats per valid token of the held-out text."),
    ("evaluated", "bits_per_byte", "validation_bits_per_byte", "Bits per byte of the held-out text."),
    ("evaluated", "accuracy", "validation_accuracy", "The share of held-out targets that were classified right."),
    ("goodput", "ettr", "goodput", "The share of the run's time that has made headway."),
    ("rolled", "reward", "reward", "The mean reward of the newest step's answers."),
    ("started", "steps", "steps_planned", "Steps of the whole run."),
    ("started", "world", "ranks", "Ranks in all."),
    ("started", "predicted_step_s", "predicted_step_seconds", "What a step was predicted to take."),
)
"""Event, its field, the metric's name and help; ``counted`` is tokens, or samples."""

COUNTERS = (
    ("step", "step", "steps", "Finished steps. It falls where the run goes back."),
    ("step", "tokens_seen", "{counted}", "Valid {counted} since step 0."),
)

COUNTED = (
    ("saved", "checkpoints", "Checkpoints that were saved."),
    ("resumed", "resumes", "Times that the run was gone on with."),
    ("rolled_back", "rollbacks", "Times that the run went back before a step."),
    ("retried", "retries", "Graders that failed."),
    ("warning", "warnings", "What went wrong that the run went on in spite of: checkpoints that were not written."),
)
"""Events that are counted."""


def exposition(run: str, lines: Iterable[Mapping[str, Any]], *, updated_at_s: float | None = None) -> str:
    """The text for Prometheus.

    Args:
        run: its name, the label of each number.
        lines: the objects of its metrics.jsonl.
        updated_at_s: its last report, in seconds since 1970.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    counts: dict[str, int] = {}
    for line in lines:
        newest[line["event"]] = line
        counts[line["event"]] = counts.get(line["event"], 0) + 1
    counted = newest.get("step", {}).get("counts", "tokens")
    label = f'{{run="{_escape(run)}"}}'
    text: list[str] = []

    def add(name: str, kind: str, about: str, value: float | None) -> None:
        if value is not None:
            full, about = f"superstep:{name}".format(counted=counted), about.format(counted=counted)
            text.extend((f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full}{label} {value}"))

    for event, field, name, about in GAUGES:
        add(name, "gauge", about, newest.get(event, {}).get(field))
    for event, field, name, about in COUNTERS:
        add(f"{name}_total", "counter", about, newest.get(event, {}).get(field))
    for event, name, about in COUNTED:
        add(f"{name}_total", "counter", about, counts.get(event, 0))
    add("told_timestamp_seconds", "gauge", "When the run last wrote its metrics.", updated_at_s)
    return "\n".join(text) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
