"""superstep train: prepares the run directory and the tokens, launches the ranks, and shows what they report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.cli import sample
from superstep.cli.arguments.train import Asked, read
from superstep.cli.describe import plan_text
from superstep.cli.preparing import prepared
from superstep.cli.prove import verb as prove
from superstep.cli.train.display import open_display, restore
from superstep.cli.train.ending import ended, stopped
from superstep.cli.train.memory_fit import require_fit
from superstep.cost.device_peak import peak_flops
from superstep.cost.program.machine import Measured
from superstep.cost.program.operation import UnitOperations
from superstep.cost.program.predict import predict
from superstep.cost.program.work import MFU_CONVENTION
from superstep.data.prepare import is_prepared, prepare
from superstep.data.tokens import Manifest, is_whole, open_corpus
from superstep.errors import Fault
from superstep.observe.events import Fanout, Resumed, RunStarted, Sink
from superstep.observe.jsonl import JsonLines
from superstep.observe.tensorboard import TensorBoard
from superstep.plan.config import DeviceKind
from superstep.plan.resolve import Resolved
from superstep.plan.toml import read_config
from superstep.runtime.device import Device, choose, gpus
from superstep.runtime.join import join
from superstep.runtime.launch import World, launch_on
from superstep.runtime.measure.here import measure_here
from superstep.runtime.stop import STOPPED, listening
from superstep.state.checkpoint import read_position
from superstep.train import rundir
from superstep.train.loop import train
from superstep.train.model import flops_per_token, operations, resolved, vocab_of
from superstep.train.run_folder import RunFolder
from superstep.train.session import Rate, Session
from superstep.train.start import check_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    """Whether it goes on beyond what was its last step: then what follows a demo has been seen."""
    operations: tuple[UnitOperations, ...] | None
    """What the units do; None where it cannot be told before they run."""
    flops_per_token: float | None


def main(argv: Sequence[str]) -> int:
    """Train; after a demo, prove its layout and show a sample."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return join(lambda ranks: _prepared(_run(read(argv), ranks)), _rank_of_torchrun, _asked)
    asked = read(argv)
    run = _run(asked)
    with _prepared(_demo_on_few_gpus(run) if asked.is_demo else run) as job:
        if job is None:
            return 0
        try:
            is_stopped = launch_on(_asked(job), job.run.plan.mesh.world, _rank, job)
        except BaseException as error:
            restore(sys.stdout)
            if (status := ended(error, job.folder)) is not None:
                return status
            raise
    if is_stopped:
        return stopped(job.folder)
    if asked.is_demo and not job.was_complete:
        return _after_demo(job)
    _say(f"\nResults: {job.folder.root}")
    return 0


def _run(asked: Asked, ranks: int | None = None) -> Resolved:
    return asked.resolved(lambda config: resolved(config, ranks))


def _demo_on_few_gpus(run: Resolved) -> Resolved:
    """The demo shows its two ranks on any machine: on the CPU, where there are GPUs, but not for each."""
    ranks, plan = run.plan.mesh.world, run.config.plan
    if plan.device is not None or not 0 < gpus() < ranks:
        return run
    _say(f"{ranks} ranks and fewer GPUs: the demo computes on the CPU; with --plan.dp 1 it takes the GPU.")
    return replace(run, config=replace(run.config, plan=replace(plan, device="cpu")))


def _asked(job: Job | None) -> DeviceKind | None:
    """The device that a run asks for."""
    return None if job is None else job.run.config.plan.device


def _after_demo(job: Job) -> int:
    root = job.folder.root
    _say("\nDoes this layout compute what one device would?")
    status = prove.run_one(job.run, job.corpus, steps=2)
    _say('\nA sample, from "def ":\n')
    _say(sample.text(root, "def ", tokens=120, temperature=0.7, seed=0))
    _say(
        f"\nResults: {root}\n"
        f"  metrics      {root}/metrics.jsonl, and tensorboard --logdir {root}/tensorboard\n"
        f"  checkpoints  {root}/checkpoints\n"
        f"  the step     superstep view {root} --text\n"
        f'  more text    superstep sample {root} "def "'
    )
    return status


@contextmanager
def _prepared(run: Resolved) -> Iterator[Job | None]:
    """The run's directory, held for the length of the block, and the tokens in their place; None where there is
    nothing left to do.
    """
    run, folder, checkpoint = rundir.choose(run)
    if checkpoint is None:
        check_start(run)
    seen = operations(run)
    # torchrun says how many of its ranks are on this host, srun does not.
    local = os.environ.get("LOCAL_WORLD_SIZE", "1" if "RANK" in os.environ else run.plan.mesh.world)
    if choose(run.config.plan.device, int(local)) == "cpu":
        # What a GPU has left its rank alone can tell: to ask takes a part of it.
        require_fit(run, Device("cpu"), seen, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", run.plan.mesh.world)))
    with rundir.hold(folder):
        step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= run.config.train.steps:
            _say(f"The run in {folder.root} is complete at step {step}; raise --train.steps to go on with it.")
            yield None
        else:
            yield Job(
                run=run,
                folder=folder,
                corpus=_tokens(run, folder, checkpoint),
                checkpoint=checkpoint,
                was_complete=checkpoint is not None and step >= read_config(folder.config).train.steps,
                operations=seen,
                flops_per_token=flops_per_token(run, seen),
            )


def _tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
    """The folder of token files, made where need be. A run goes on with those that it was started with."""
    data = run.config.data
    kept = Path(data.cache) if data.cache else folder.root / "data"
    if checkpoint is None or not is_whole(kept):
        if is_prepared(data, vocab_of(run), kept):
            prepare(data, vocab_of(run), kept)
        else:
            try:
                prepared(data, vocab_of(run), kept, sys.stdout, is_shared=bool(data.cache))
            except (KeyboardInterrupt, SystemExit) as error:
                if (status := ended(error, folder)) is not None:
                    raise SystemExit(status) from None
                raise
    if checkpoint is not None:
        rundir.check_tokens(checkpoint, kept)
    return kept


def _rank_of_torchrun(world: World, job: Job | None) -> int:
    """One rank's exit status; rank 0 speaks for all."""
    if job is None:
        return 0
    try:
        is_stopped = _rank(world, job)
    except (KeyboardInterrupt, SystemExit) as error:
        if world.rank == 0 and (status := ended(error, job.folder)) is not None:
            return status
        raise
    if is_stopped and world.rank == 0:
        return stopped(job.folder)
    return STOPPED if is_stopped else 0


def _rank(world: World, job: Job) -> bool:
    """One rank, from assembly to the last step; whether it was asked to stop before that, and has.

    Raises:
        Fault: torch raised what it raises wherever something breaks below it: memory, a connection, a kernel.
    """
    try:
        with listening(world.stop):
            return _train(world, job)
    except RuntimeError as error:
        raise Fault(str(error).partition("\n")[0], rank=world.rank) from error


def _train(world: World, job: Job) -> bool:
    if world.device.kind == "cuda":
        require_fit(job.run, world.device, job.operations)
    machine = None if job.operations is None else measure_here(job.run, job.operations, world)
    peak = _peak_flops(job.run, world, machine)
    rate = Rate(flops_per_token=job.flops_per_token, peak_flops=peak)
    session = Session(world, job.run, job.folder, job.corpus, rate)
    position = session.begin() if job.checkpoint is None else session.load(job.checkpoint)
    with ExitStack() as stack:
        sink: Sink = Fanout(())
        if world.rank == 0:
            # Whatever can be refused has been: only now does the directory become, or change, a run.
            is_resumed = job.checkpoint is not None or job.folder.metrics.exists()
            rundir.write(job.run, job.folder)
            session.describe()
            sink = _sinks(job, stack, peak)
            sink.write(_started(job, world, session.transport, open_corpus(job.corpus).manifest, machine))
            if is_resumed:
                sink.write(Resumed(step=position.step, path=str(job.checkpoint or "")))
        position = train(session, position, sink)
    # Only here: after a failure the process ends, and to wait for ranks that are gone would hide why.
    session.close()
    return position.step < job.run.config.train.steps


def _peak_flops(run: Resolved, world: World, machine: Measured | None) -> float | None:
    """What MFU is measured against: what was asked for, the data sheet's figure, on a CPU the measured rate."""
    if run.config.observe.peak_flops is not None:
        return run.config.observe.peak_flops
    if world.device.kind == "cpu":
        return None if machine is None else machine.gemm_flops_per_s
    return peak_flops(world.device.name, run.config.numerics.compute)


def _sinks(job: Job, stack: ExitStack, peak: float | None) -> Sink:
    observe = job.run.config.observe
    against = "no peak is known" if peak is None else f"peak {peak / 1e9:,.0f} GFLOP/s a rank"
    convention = f"{MFU_CONVENTION}; {against}"
    display = stack.enter_context(open_display(sys.stdout, mfu_convention=convention, log_every=observe.log_every))
    sinks: list[Sink] = [JsonLines(job.folder.metrics), display]
    if observe.tensorboard:
        sinks.append(TensorBoard(job.folder.tensorboard))
    fanout = Fanout(sinks)
    stack.callback(fanout.close)
    return fanout


def _started(job: Job, world: World, transport: str, manifest: Manifest, machine: Measured | None) -> RunStarted:
    prediction = None if machine is None else predict(job.run, machine, job.operations)
    return RunStarted(
        run=str(job.folder.root),
        plan=plan_text(job.run),
        parameters=job.run.outline.numel,
        world=world.size,
        transport=transport,
        steps=job.run.config.train.steps,
        unigram_entropy=manifest.unigram_nats,
        predicted_step_s=prediction.step_s if prediction else None,
        predicted_memory_bytes=prediction.memory_bytes if prediction else None,
        memory="resident" if world.device.kind == "cpu" else "allocated",
    )


def _say(text: str) -> None:
    print(text, flush=True)
