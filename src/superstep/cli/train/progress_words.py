"""Words about a run that its log and its frame have in common."""

from __future__ import annotations

from superstep.cli.train.progress import Progress
from superstep.cli.train.rollback_text import headway
from superstep.observe.events import RouterStats, RunStarted, StepDone
from superstep.observe.number_format import bytes_text, count_text, seconds_text
from superstep.observe.router_balance import busiest, share_dropped


def router_words(stats: RouterStats) -> list[str]:
    """The busiest expert of all layers, and the dropped tokens."""
    loads = [busiest(row) for row in stats.chosen]
    dropped = share_dropped(sum(stats.chosen, ()), sum(stats.dropped, ()))
    return [f"busiest expert {max(loads):.2f}x the mean, in layer {loads.index(max(loads))}", f"dropped {dropped:.1%}"]


def run_text(run: RunStarted) -> str:
    ranks = "1 rank" if run.world == 1 else f"{run.world} ranks" + (f" over {run.transport}" if run.transport else "")
    attention = f", attention {run.attention}" if run.attention else ""
    return f"{run.plan}, {count_text(run.parameters)} parameters, {ranks}{attention}"


def run_notes(progress: Progress) -> list[str]:
    run = progress.started
    predicted = []
    if run and run.predicted_step_s is not None:
        predicted.append(f"{seconds_text(run.predicted_step_s)} a step")
    if run and run.predicted_memory_bytes is not None:
        predicted.append(f"{bytes_text(run.predicted_memory_bytes)} of tensors on the fullest rank")
    if run and run.snapshot_bytes:
        pinned = f", which cannot be pinned ({run.snapshots_unpinned})" if run.snapshots_unpinned else ""
        predicted.append(f"snapshots of up to {bytes_text(run.snapshot_bytes)} in its host's memory{pinned}")
    notes = comparison_lines(progress) or ([f"predicted: {', '.join(predicted)}"] if predicted else [])
    if warned := progress.warned:
        notes.append(f"last warning, after step {warned.step}: {warned.text}")
    if again := progress.retried:
        notes.append(f"last repeated grade, after step {again.step}: {again.why}")
    layers = [f"layers: {run.layers}"] if run and run.layers else []
    return [*layers, *notes, f"MFU: {progress.mfu_convention}"]


def comparison_lines(progress: Progress) -> list[str]:
    """Predicted and measured numbers, at the end of a run."""
    run, done = progress.started, progress.finished
    if run is None or done is None:
        return []
    parts = []
    if run.predicted_step_s is not None and done.step_s is not None:
        share = done.step_s / run.predicted_step_s - 1
        parts.append(f"{seconds_text(run.predicted_step_s)} a step, took {seconds_text(done.step_s)} ({share:+.0%})")
    if run.predicted_memory_bytes is not None and done.peak_bytes is not None:
        parts.append(
            f"{bytes_text(run.predicted_memory_bytes)} of tensors on the fullest rank, took "
            f"{bytes_text(done.peak_bytes)}"
        )
    lines_so_far = [f"predicted: {'; '.join(parts)}"] if parts else []
    return lines_so_far if progress.goodput is None else [*lines_so_far, headway(progress.goodput, run.predicted_ettr)]


def validation_words(progress: Progress) -> list[str]:
    """References of a validation loss."""
    notes = []
    if progress.started and progress.started.unigram_entropy is not None:
        notes.append(f"unigram entropy {progress.started.unigram_entropy:.4f}")
    if progress.evaluated and progress.evaluated.bits_per_byte is not None:
        notes.append(f"{progress.evaluated.bits_per_byte:.3f} bits per byte")
    if progress.evaluated and progress.evaluated.accuracy is not None:
        notes.append(f"accuracy {progress.evaluated.accuracy:.2%}")
    return notes


def unit_of_counts(progress: Progress) -> str:
    return progress.started.counts if progress.started else "tokens"


def is_resident(progress: Progress) -> bool:
    """Whether memory is that of whole processes, which the prediction does not cover."""
    return progress.started is not None and progress.started.memory == "resident"


def mfu_text(step: StepDone) -> str:
    return "-" if step.mfu is None else f"{step.mfu:.1%}"


def data_share(step: StepDone) -> float:
    return step.data_s / step.step_s if step.step_s > 0 else 0.0
