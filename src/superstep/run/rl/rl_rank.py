"""The work of each rank of a run of reinforcement learning, and rank 0's reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from superstep.engine.attention.choose_attention import kernel_of
from superstep.errors import Fault
from superstep.grade.verdict import Verdict
from superstep.launch.ranks import RankWorld, World
from superstep.launch.stop_request import listening
from superstep.observe.events import (
    Event,
    Fanout,
    Resumed,
    Retried,
    RolloutStats,
    RunFinished,
    RunStarted,
    Sink,
    StepDone,
)
from superstep.run.console import Console
from superstep.run.exit_messages import status_under_torchrun
from superstep.run.reports.plan_line import plan_text
from superstep.run.reports.sinks import open_trackers, sinks
from superstep.train.run_folder.run_lock import hold_shared
from superstep.tune.rl.colocated import reinforce
from superstep.tune.rl.disaggregated.disaggregated import worlds_of
from superstep.tune.rl.disaggregated.sampler_rank import sample_apart
from superstep.tune.rl.disaggregated.trainer_rank import train_apart
from superstep.tune.rl.job import RlJob
from superstep.tune.rl.step_rewards import RlStepResult

VERB = "tune rl"
"""The words after superstep that resume a run."""


def run_worlds(job: RlJob, console: Console) -> list[RankWorld]:
    """The worlds of a run under superstep's launcher: the ranks that train, and each sampler with ranks of its own."""
    return worlds_of(job, rl_rank, rl_sampler, console=console)


def torchrun_worlds(job: RlJob | None, ranks: int, console: Console) -> list[RankWorld]:
    """The same under torchrun, where a worker returns its exit status. One world where the run is complete."""
    if job is None:
        return [RankWorld(size=ranks, worker=lambda world: 0)]
    return worlds_of(job, _train_status, _sample_status, console=console)


def _train_status(world: World, job: RlJob, console: Console) -> int:
    return status_under_torchrun(world, lambda: rl_rank(world, job, console), job.folder, console, VERB)


def _sample_status(world: World, job: RlJob, number: int) -> int:
    try:
        rl_sampler(world, job, number)
    except Fault as fault:
        raise fault.of(f"sampler {number}") from fault.__cause__
    return 0


def rl_rank(world: World, job: RlJob, console: Console) -> bool:
    """One training rank; whether it stopped before the last step on request."""
    train = reinforce if job.rollout.placement == "shared" else train_apart
    with _faults(world), listening(world.stop), hold_shared(job.folder), ExitStack() as stack:
        report = RlReport(world, job, console, stack)
        is_stopped = train(world, job, report.learnt, report.write, report.report_retry)
        if not is_stopped:
            report.finish()
        return is_stopped


def rl_sampler(world: World, job: RlJob, number: int) -> None:
    """One rank of a sampler. After a request to stop, it continues until the trainer needs no more."""
    with _faults(world), listening(world.stop):
        sample_apart(world, job, number)


@contextmanager
def _faults(world: World) -> Iterator[None]:
    """Converts torch's RuntimeError into a Fault."""
    try:
        yield
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


class RlReport:
    """Rank 0 reports steps, checkpoints and failed graders; the others nothing. Thread-safe."""

    def __init__(self, world: World, job: RlJob, console: Console, stack: ExitStack) -> None:
        self._job = job
        self._console = console
        self._start_s = time.perf_counter()
        self._device = world.device
        self._step, self._tokens = job.program.cursor.step, 0
        self._sink: Sink = Fanout(())
        self._lock = threading.Lock()
        if world.rank == 0:
            self._sink = self._open_sinks(world, stack)

    def _open_sinks(self, world: World, stack: ExitStack) -> Sink:
        folder, observe = self._job.folder, self._job.run.config.observe
        is_resumed = folder.metrics.exists()
        convention = "not reported, since a step also samples"
        display = self._console.open_display(mfu_convention=convention, log_every=observe.log_every)
        stack.enter_context(display)
        trackers = open_trackers(self._job.run.config, folder)
        sink = Fanout(sinks(observe, folder, display, trackers, self._console.warn))
        stack.callback(sink.close)
        sink.write(
            RunStarted(
                run=str(folder.root),
                plan=plan_text(self._job.run),
                parameters=self._job.run.outline.numel,
                world=world.size,
                transport="",
                attention=kernel_of(self._job.run, world.device),
                steps=self._job.run.config.train.steps,
                memory="resident" if world.device.kind == "cpu" else "allocated",
            )
        )
        if self._job.resumed is not None:
            sink.write(self._job.resumed)
        elif is_resumed:
            sink.write(Resumed(step=self._step, path=str(self._job.checkpoint or "")))
        return sink

    def learnt(self, learnt: RlStepResult) -> None:
        """Report a step."""
        result = learnt.result
        self._step, self._tokens = learnt.step, learnt.tokens_seen
        self.write(
            StepDone(
                step=learnt.step,
                loss=result.loss,
                lr=learnt.lr,
                grad_norm=result.grad_norm,
                tokens=result.tokens,
                tokens_per_s=result.tokens / max(learnt.seconds, 1e-9),
                step_s=learnt.seconds,
                data_s=learnt.sampling_s,
                mfu=None,
                memory_bytes=self._device.memory_bytes(),
                elapsed_s=time.perf_counter() - self._start_s,
                tokens_seen=learnt.tokens_seen,
            )
        )
        self.write(
            RolloutStats(
                step=learnt.step,
                reward=learnt.reward,
                answers=learnt.answers,
                lost=learnt.lost,
                cut=learnt.cut,
                uniform=learnt.uniform,
                lag=learnt.lag,
                drawn_tokens=learnt.drawn_tokens,
                seconds=learnt.seconds,
                measures=dict(result.measures),
                at_s=time.time(),
            )
        )

    def report_retry(self, verdict: Verdict) -> None:
        """Report a failed grader; the answer is graded again."""
        self.write(Retried(step=self._step, why=verdict.why))

    def finish(self) -> None:
        """Report the end, after the last step is saved."""
        elapsed_s = time.perf_counter() - self._start_s
        self.write(RunFinished(step=self._step, elapsed_s=elapsed_s, tokens_seen=self._tokens))

    def write(self, event: Event) -> None:
        """Report another event, such as a checkpoint."""
        with self._lock:
            self._sink.write(event)
