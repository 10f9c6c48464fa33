"""The sinks of a run's events."""

from __future__ import annotations

from contextlib import ExitStack

from superstep.cost.program import lora
from superstep.cost.program.flops import FROZEN_CONVENTION, MFU_CONVENTION
from superstep.launch.ranks import World
from superstep.observe.events import Fanout, Sink
from superstep.observe.goodput import GoodputSink
from superstep.run.console import Console
from superstep.run.job import TrainJob
from superstep.run.reports.sinks import open_trackers, sinks
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.report_status import StatusSink
from superstep.train.run_folder.run_paths import write_whole


def open_sink(job: TrainJob, stack: ExitStack, world: World, peak: float | None, console: Console) -> Sink:
    """The sink of a run's events on rank 0; closed with ``stack``. Call this when all checks are done: only now does
    the directory become, or change, a run.

    Args:
        job: the run.
        stack: closes it.
        world: receives the run's status.
        peak: reference FLOP/s of a rank for MFU, if known.
        console: shows the events.
    """
    observe = job.run.config.observe
    trackers = open_trackers(job.run.config, job.folder)
    run_directory.write(job.requested or job.run, job.folder)
    for name, text in job.files.items():
        write_whole(job.folder.root / name, text)
    against = "no peak is known" if peak is None else f"peak {peak / 1e9:,.0f} GFLOP/s a rank"
    counted_by = MFU_CONVENTION if job.run.config.lora is None else lora.CONVENTION
    counted_by = counted_by if job.run.config.freeze is None else FROZEN_CONVENTION
    convention = f"{counted_by}; {against}"
    display = stack.enter_context(console.open_display(mfu_convention=convention, log_every=observe.log_every))
    opened = Fanout(sinks(observe, job.folder, display, trackers, console.warn))
    counted = GoodputSink(opened, job.folder.metrics, began_at_s=job.began_at_s, earlier_s=job.earlier_s)
    stack.callback(counted.close)
    return StatusSink(world.heart, counted)
