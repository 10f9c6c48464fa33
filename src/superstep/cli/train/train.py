"""superstep train: prepares the run directory and the tokens, launches the ranks, and shows their reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from superstep.cli import sample
from superstep.cli.arguments.sample import SampleOptions
from superstep.cli.arguments.train import TrainArgs, read
from superstep.cli.choices import describe_changed_layout, idle_places, places_of
from superstep.cli.flags.options import asks_for_hosts
from superstep.cli.join_hosts import join_hosts
from superstep.cli.launcher import is_of_torchrun, launcher
from superstep.cli.prepare_progress import prepare_with_progress
from superstep.cli.prove import prove
from superstep.cli.train.live_report import web
from superstep.cli.train.terminal import Terminal
from superstep.comm.device import gpus
from superstep.data.preparation.prepare import is_prepared, prepare
from superstep.launch.torchrun import join, one_world
from superstep.plan.resolution.resolve import Resolved
from superstep.run.exit_messages import ended
from superstep.run.hosts.hosts import Hosts, share_out
from superstep.run.hosts.multi_host import on_hosts
from superstep.run.hosts.train_on_hosts import TrainOnHosts
from superstep.run.job import TrainJob, asked_device, prepared_job
from superstep.run.job_message import JOB
from superstep.run.launch_ranks import launch
from superstep.run.launch_rules import OTHER_LAUNCHERS, SEVERAL_HOSTS, check_web
from superstep.run.rank import rank_of_torchrun
from superstep.run.tokens import tokens_in
from superstep.train.run_folder.run_lock import note_preparing
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config, vocab_of


def main(argv: Sequence[str]) -> int:
    """Train; after a demo, prove its layout and show a sample."""
    if asks_for_hosts(argv):
        arguments = read(argv)
        if arguments.hosts is not None:
            run = _run(arguments)
            check_web(arguments.web_port, SEVERAL_HOSTS)
            return _on_hosts(run, arguments.hosts)
    if is_of_torchrun():
        worlds = one_world(partial(rank_of_torchrun, console=Terminal()))
        return int(join(lambda ranks: _job_of_torchrun(read(argv), ranks), worlds, JOB, asked_device))
    arguments = read(argv)
    run = _run(arguments)
    if arguments.is_demo:
        run = demo_on_few_gpus(run)
    _say_choices(arguments, run)
    with web(arguments.web_port) as shown, prepared_job(run, _tokens, Terminal(), launcher=launcher()) as job:
        if job is None:
            return 0
        shown(job.folder)
        if (status := launch(job, Terminal())) is not None:
            return status
    if arguments.is_demo and not job.was_complete:
        return _after_demo(job)
    _say(f"\nResults: {job.folder.root}")
    if job.folder.profiles.is_dir():
        _say(f"  profiles  {job.folder.profiles}, which ui.perfetto.dev opens")
    return 0


def _job_of_torchrun(arguments: TrainArgs, ranks: int) -> AbstractContextManager[TrainJob | None]:
    run = _run(arguments, ranks)
    check_web(arguments.web_port, OTHER_LAUNCHERS)
    return prepared_job(run, _tokens, Terminal(), launcher=launcher())


def _on_hosts(run: Resolved, hosts: Hosts) -> int:
    """This host's part of a run on several."""
    address = join_hosts(hosts)
    return on_hosts(
        TrainOnHosts(share_out(run, hosts.count), hosts.count, _tokens, Terminal()), hosts, address, Terminal()
    )


def _run(arguments: TrainArgs, ranks: int | None = None) -> Resolved:
    return arguments.resolved(lambda config: resolve_config(config, ranks))


def _say_choices(arguments: TrainArgs, run: Resolved) -> None:
    """Show automatic choices that the user might not expect."""
    changed = describe_changed_layout(arguments.config, run, resolve_config)
    if changed is not None:
        _say(changed)
    elif arguments.has_no_dp and (idle := idle_places(run, *places_of(run))) is not None:
        _say(idle)


def demo_on_few_gpus(run: Resolved) -> Resolved:
    """The demo shows its two ranks on any machine: on the CPU, if there are GPUs, but not enough."""
    ranks, plan = run.plan.mesh.world, run.config.plan
    if plan.device is not None or not 0 < gpus() < ranks:
        return run
    _say(f"{ranks} ranks and fewer GPUs: the demo computes on the CPU; with --plan.dp 1 it takes the GPU.")
    return replace(run, config=replace(run.config, plan=replace(plan, device="cpu")))


def _after_demo(job: TrainJob) -> int:
    root = job.folder.root
    _say("\nDoes this layout compute what one device would?")
    status = prove.run_one(job.run, job.corpus, steps=2)
    _say('\nA sample, from "def ":\n')
    _say(sample.text(root, "def ", SampleOptions(tokens=120, temperature=0.7)))
    _say(
        f"\nResults: {root}\n"
        f"  metrics      {root}/metrics.jsonl, and tensorboard --logdir {root}/tensorboard\n"
        f"  checkpoints  {root}/checkpoints\n"
        f"  the step     superstep view {root} --text\n"
        f'  more text    superstep sample {root} "def "'
    )
    return status


def _tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
    return tokens_in(run, folder, checkpoint, partial(_make_tokens, run, folder))


def _make_tokens(run: Resolved, folder: RunFolder, kept: Path) -> None:
    """Make the token files of a run, with progress output."""
    data = run.config.data
    if is_prepared(data, vocab_of(run), kept):
        prepare(data, vocab_of(run), kept)
        return
    try:
        prepare_with_progress(
            data,
            vocab_of(run),
            kept,
            sys.stdout,
            is_shared=bool(data.cache),
            note=partial(note_preparing, folder),
        )
    except (KeyboardInterrupt, SystemExit) as error:
        if (status := ended(error, folder, Terminal(), is_of_torchrun=is_of_torchrun())) is not None:
            raise SystemExit(status) from None
        raise


def _say(text: str) -> None:
    print(text, flush=True)
