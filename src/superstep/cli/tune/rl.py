"""superstep tune rl: launches ranks that sample and train, and shows what they report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from superstep.cli.choices import shorter_sequences
from superstep.cli.launcher import is_of_torchrun
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.cli.train.terminal import Terminal
from superstep.comm.device import Device, choose
from superstep.engine.attention.choose_attention import kernel_of
from superstep.errors import ConfigError, Fault
from superstep.grade.verdict import Verdict
from superstep.launch.ranks import World, launch_apart, launch_on, launch_parties
from superstep.launch.stop_request import listening
from superstep.observe.events import (
    Event,
    Fanout,
    Resumed,
    Retried,
    Rolled,
    RunFinished,
    RunStarted,
    Sink,
    StepDone,
)
from superstep.plan.config_io import write_config
from superstep.run.disk_check import require_disk
from superstep.run.exit_messages import ended, stopped
from superstep.run.launch_rl import launch_rl
from superstep.run.memory_check import require_fit
from superstep.run.reports.plan_line import plan_text
from superstep.run.reports.report import leave_report
from superstep.run.reports.sinks import open_trackers, require_trackers, sinks
from superstep.state.checkpoint import read_position
from superstep.state.object_store.store_sync import fetch_newest, mirrored
from superstep.state.verify import newest, verify
from superstep.train.resume import pass_over
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.checkpoint_store import store_of
from superstep.train.run_folder.run_lock import hold
from superstep.train.run_folder.run_paths import write_whole
from superstep.train.weights.model import operations, resolve_config
from superstep.tune.recipe import RECIPE, write
from superstep.tune.rl.config import USUAL_TOKENS, RlRecipe
from superstep.tune.rl.disaggregated.disaggregated import parties_of, sample_apart, train_apart
from superstep.tune.rl.initial_policy import check_same, check_tokenizer, with_start
from superstep.tune.rl.job import RlJob, job_of, own_ranks, reinforce
from superstep.tune.rl.step_rewards import Learnt


def run(recipe: RlRecipe) -> int:
    """Learn from rewards as a recipe says; the exit status."""
    if is_of_torchrun():
        raise ConfigError(
            "superstep tune rl launches its ranks itself, on one host: start it once, without torchrun (or srun), and "
            f"ask for {os.environ['WORLD_SIZE']} ranks with --plan.dp or --plan.tp."
        )
    with _prepared(recipe) as job:
        if job is None:
            return 0
        try:
            is_stopped = launch_rl(job, _launch, Terminal().restore)
        except BaseException as error:
            Terminal().restore()
            leave_report(job.folder)
            if (status := ended(error, job.folder, Terminal(), "tune rl")) is not None:
                return status
            raise
        if is_stopped:
            leave_report(job.folder)
            return stopped(job.folder, Terminal(), "tune rl")
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0


@contextmanager
def _prepared(recipe: RlRecipe) -> Iterator[RlJob | None]:
    """What the ranks are told, the run's directory held for the length of the block; None where nothing is left."""
    config, start = with_start(recipe, recipe.rl, recipe.start)
    if (shorter := shorter_sequences(recipe, config, USUAL_TOKENS)) is not None:
        print(shorter, flush=True)
    require_trackers(config.observe)
    check_tokenizer(recipe.start, config)
    choice, folder, checkpoint = run_directory.choose(resolve_config(config), verify)
    check_same(recipe, folder)
    store = store_of(choice, checkpoint)
    if choose(choice.config.plan.device, choice.plan.mesh.world) == "cpu":
        require_fit(choice, Device("cpu"), operations(choice), ranks=choice.plan.mesh.world)
    with hold(folder), mirrored(folder.checkpoints, store, choice.config.state.keep):
        if store is not None and choice.config.state.existing == "resume":
            for told in fetch_newest(store, folder.checkpoints):
                print(told, flush=True)
            checkpoint = newest(folder.checkpoints, verify)
        step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= choice.config.train.steps:
            print(f"The run in {folder.root} is complete; raise --train.steps to go on with it.", flush=True)
            yield None
            return
        require_disk(choice, folder, step)
        job = job_of(
            choice,
            recipe.rl,
            recipe.rollout,
            recipe.grade,
            folder=folder,
            start=start,
            checkpoint=checkpoint,
            kernels=kernels_folder(None),
        )
        has_begun = folder.config.is_file()
        for why in pass_over(checkpoint, verify) if checkpoint is not None else ():
            print(f"passed over: {why}", flush=True)
        files = {
            folder.config.name: write_config(choice.config),
            RECIPE: write(replace(recipe, state=choice.config.state)),
        }
        for name, text in files.items():
            write_whole(folder.root / name, text)
        if not has_begun:
            print(f"{folder.root}: {plan_text(choice)}", flush=True)
        yield replace(job, files=files)


def _launch(job: RlJob) -> bool:
    """Launch the ranks; whether they were asked to stop before the last step, and have."""
    asked, trainers = job.run.config.plan.device, job.run.plan.mesh.world
    if job.rollout.placement == "apart":
        kind = choose(asked, trainers + own_ranks(job.rollout))
        return bool(launch_parties(kind, parties_of(job, _rank, _sampler)))
    if job.snapshots is None:
        return launch_on(asked, trainers, _rank, job)
    return launch_apart(choose(asked, trainers), trainers, _rank, job)  # what outlives a rank needs ranks apart


def _rank(world: World, job: RlJob) -> bool:
    """One rank that trains; whether it was asked to stop before the last step, and has."""
    train = reinforce if job.rollout.placement == "shared" else train_apart
    with _faults(world), listening(world.stop), ExitStack() as stack:
        teller = _Teller(world, job, stack)
        is_stopped = train(world, job, teller.learnt, teller.write, teller.retried)
        if not is_stopped:
            teller.finish()
        return is_stopped


def _sampler(world: World, job: RlJob, number: int) -> None:
    """One rank of a sampler. Asked to stop, it goes on until the trainer wants no more."""
    with _faults(world), listening(world.stop):
        sample_apart(world, job, number)


@contextmanager
def _faults(world: World) -> Iterator[None]:
    """What torch raises wherever something breaks below it is a Fault."""
    try:
        yield
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


class _Teller:
    """Rank 0 tells of steps, checkpoints and graders that fail; the others of nothing. Any thread may call it."""

    def __init__(self, world: World, job: RlJob, stack: ExitStack) -> None:
        self._job = job
        self._start_s = time.perf_counter()
        self._device = world.device
        self._step, self._tokens = job.program.cursor.step, 0
        self._sink: Sink = Fanout(())
        self._lock = threading.Lock()
        if world.rank == 0:
            self._sink = self._opened(world, stack)

    def _opened(self, world: World, stack: ExitStack) -> Sink:
        folder, observe = self._job.folder, self._job.run.config.observe
        is_resumed = folder.metrics.exists()
        convention = "not told of steps that sample as well"
        display = Terminal().open_display(mfu_convention=convention, log_every=observe.log_every)
        stack.enter_context(display)
        trackers = open_trackers(self._job.run.config, folder)
        sink = Fanout(sinks(observe, folder, display, trackers, Terminal().warn))
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

    def learnt(self, learnt: Learnt) -> None:
        """A step."""
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
            Rolled(
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

    def retried(self, verdict: Verdict) -> None:
        """A grader failed, and the answer is graded again."""
        self.write(Retried(step=self._step, why=verdict.why))

    def finish(self) -> None:
        """The last step is saved."""
        elapsed_s = time.perf_counter() - self._start_s
        self.write(RunFinished(step=self._step, elapsed_s=elapsed_s, tokens_seen=self._tokens))

    def write(self, event: Event) -> None:
        """Anything else, such as a checkpoint."""
        with self._lock:
            self._sink.write(event)
