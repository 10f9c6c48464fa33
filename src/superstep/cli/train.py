"""superstep train: prepares the run directory and the tokens, launches the ranks, and shows what they report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from superstep.cli import prove, sample
from superstep.cli.display import open_display
from superstep.cli.options import flags, parse
from superstep.cost.devices import peak_flops
from superstep.cost.predict import Machine, Prediction, predict
from superstep.cost.work import MFU_CONVENTION, parameters
from superstep.data.tokens import Manifest, open_corpus, prepare
from superstep.errors import SuperstepError
from superstep.observe.events import Fanout, Resumed, RunStarted, Sink
from superstep.observe.jsonl import JsonLines
from superstep.observe.tensorboard import TensorBoard
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Resolved, resolve
from superstep.plan.toml import read_config
from superstep.runtime.launch import World, gather, join, launch
from superstep.runtime.measure import measure
from superstep.state.checkpoint import Position
from superstep.train import rundir
from superstep.train.loop import train
from superstep.train.session import RunFolder, Session

DESCRIPTION = "Train a model. Without a run.toml: a demo, two ranks on the source text of Python's own library."


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None


def main(argv: Sequence[str]) -> int:
    """Train; after a demo, prove its layout and show a sample."""
    config, has_file = parse("train", argv, description=DESCRIPTION)
    saved = Path(config.state.dir) / "run.toml"
    if config.state.existing == "resume" and not has_file and saved.is_file():
        # A run that goes on keeps its own settings; flags still change them.
        config = flags("train", read_config(saved), argv, description=DESCRIPTION)
    launched = os.environ.get("WORLD_SIZE")
    if launched is not None and "RANK" in os.environ:
        join(_joined, config, int(launched))
        return 0
    run = resolve(config)
    job = _prepare(run)
    launch(run.plan.mesh.world, _rank, job)
    if has_file:
        _say(f"\nResults: {job.folder.root}")
        return 0
    return _after_demo(job)


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


def _prepare(run: Resolved) -> Job:
    run, folder, checkpoint = rundir.choose(run)
    data = run.config.data
    cache = Path(data.cache) if data.cache else folder.root / "data"
    if not (cache / "corpus.json").is_file():
        _say(f"Preparing the text of {', '.join(data.corpus) or 'the standard library'} in {cache} ...")
    prepare(data, run.shape.vocab, cache)
    rundir.write(run, folder)
    return Job(run=run, folder=folder, corpus=cache, checkpoint=checkpoint)


def _joined(world: World, config: RunConfig, launched: int) -> None:
    """A rank that torchrun launched: rank 0 prepares, the others learn what came of it."""
    job: Job | None = None
    problem: SuperstepError | None = None
    try:
        run = resolve(config, launched)
        job = _prepare(run) if world.rank == 0 else None
    except SuperstepError as error:
        problem = error
    answers = gather((job, problem))
    for _, found_problem in answers:
        if found_problem is not None:
            raise found_problem
    found = answers[0][0]
    assert found is not None
    _rank(world, found)


def _rank(world: World, job: Job) -> None:
    """One rank, from assembly to the last step."""
    with ExitStack() as stack:
        manifest = open_corpus(job.corpus).manifest
        sink: Sink = Fanout(())
        machine = measure(job.run, world.device)
        peak = _peak_flops(job.run, world, machine)
        session = Session(world, job.run, job.folder, job.corpus, peak)
        stack.callback(session.close)
        if world.rank == 0:
            session.describe()
            sink = _sinks(job, stack, peak)
            sink.write(_started(job, world, manifest, predict(job.run, machine)))
        position = Position()
        if job.checkpoint is not None:
            position = session.load(job.checkpoint)
            sink.write(Resumed(step=position.step, path=str(job.checkpoint)))
        if position.step >= job.run.config.train.steps:
            if world.rank == 0:
                _say(
                    f"The run in {job.folder.root} is complete at step {position.step}; "
                    "raise --train.steps to go on with it."
                )
            return
        train(session, position, sink)


def _peak_flops(run: Resolved, world: World, machine: Machine) -> float | None:
    """What MFU is measured against: what was asked for, the data sheet's figure, on a CPU the measured rate."""
    if run.config.observe.peak_flops is not None:
        return run.config.observe.peak_flops
    if world.device.kind == "cpu":
        return machine.gemm_flops_per_s
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


def _started(job: Job, world: World, manifest: Manifest, prediction: Prediction) -> RunStarted:
    return RunStarted(
        run=str(job.folder.root),
        plan=describe(job.run),
        parameters=parameters(job.run.shape),
        world=world.size,
        steps=job.run.config.train.steps,
        unigram_entropy=manifest.unigram_nats,
        predicted_step_s=prediction.step_s,
        predicted_memory_bytes=prediction.memory_bytes,
    )


def describe(run: Resolved) -> str:
    """The plan on one line."""
    plan, mesh = run.plan, run.plan.mesh
    axes = [f"{axis}={mesh.degree(axis)}" for axis in ("pp", "dp", "tp") if mesh.degree(axis) > 1] or ["1 rank"]
    parts = [*axes, f"zero={plan.zero}"] if mesh.dp > 1 else axes
    if mesh.pp > 1:
        parts += [plan.schedule, f"chunks={plan.chunks}"] if plan.chunks > 1 else [plan.schedule]
    return " ".join([*parts, f"m={plan.microbatches}x{plan.microbatch}", run.config.numerics.compute])


def _say(text: str) -> None:
    print(text, flush=True)
