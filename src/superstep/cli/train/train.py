"""superstep train: prepares the run directory and the tokens, launches the ranks, and shows their reports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from superstep.cli.arguments.train import TrainArgs, read
from superstep.cli.choices import describe_changed_layout, idle_places, places_of
from superstep.cli.flags.options import asks_for_hosts
from superstep.cli.join_hosts import join_hosts
from superstep.cli.launcher import is_of_torchrun, launcher
from superstep.cli.train.demo import after_demo, demo_on_few_gpus
from superstep.cli.train.live_report import web
from superstep.cli.train.make_tokens import tokens_of
from superstep.cli.train.terminal import Terminal
from superstep.plan.resolution.resolve import Resolved
from superstep.run.hosts.hosts import Hosts, share_out
from superstep.run.hosts.multi_host import on_hosts
from superstep.run.hosts.train_on_hosts import TrainOnHosts
from superstep.run.job import TrainJob
from superstep.run.launch_ranks import join_torchrun, launch
from superstep.run.launch_rules import OTHER_LAUNCHERS, SEVERAL_HOSTS, check_web
from superstep.run.prepare_job import prepare_job
from superstep.train.weights.model import resolve_config


def main(argv: Sequence[str]) -> int:
    """Train; after a demo, prove its layout and show a sample."""
    if asks_for_hosts(argv):
        arguments = read(argv)
        if arguments.hosts is not None:
            run = _run(arguments)
            check_web(arguments.web_port, SEVERAL_HOSTS)
            return _on_hosts(run, arguments.hosts)
    if is_of_torchrun():
        return join_torchrun(lambda ranks: _job_of_torchrun(read(argv), ranks), Terminal())
    arguments = read(argv)
    run = _run(arguments)
    if arguments.is_demo:
        run = demo_on_few_gpus(run)
    _say_choices(arguments, run)
    with web(arguments.web_port) as shown, prepare_job(run, tokens_of, Terminal(), launcher=launcher()) as job:
        if job is None:
            return 0
        shown(job.folder)
        if (status := launch(job, Terminal())) is not None:
            return status
    if arguments.is_demo and not job.was_complete:
        return after_demo(job)
    _say(f"\nResults: {job.folder.root}")
    if job.folder.profiles.is_dir():
        _say(f"  profiles  {job.folder.profiles}, which ui.perfetto.dev opens")
    return 0


def _job_of_torchrun(arguments: TrainArgs, ranks: int) -> AbstractContextManager[TrainJob | None]:
    run = _run(arguments, ranks)
    check_web(arguments.web_port, OTHER_LAUNCHERS)
    return prepare_job(run, tokens_of, Terminal(), launcher=launcher())


def _on_hosts(run: Resolved, hosts: Hosts) -> int:
    """This host's part of a run on several."""
    address = join_hosts(hosts)
    return on_hosts(
        TrainOnHosts(share_out(run, hosts.count), hosts.count, tokens_of, Terminal()), hosts, address, Terminal()
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


def _say(text: str) -> None:
    print(text, flush=True)
