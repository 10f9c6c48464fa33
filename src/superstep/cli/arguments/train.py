"""Arguments of superstep train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.arguments.hosts import HostsOptions, hosts_of, web_port_of
from superstep.cli.flags.options import COMMON, DEMO, list_named_fields, read_flags, read_run, sections_of, settle
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.hosts.hosts import Hosts

DESCRIPTION = "Train a model. Without a run.toml, train a demo: two ranks on the source of Python's standard library."


@dataclass(frozen=True, slots=True)
class TrainArgs:
    """A run from the command line.

    Attributes:
        yields_to: the flags, if they change settings that are not the user's own: those of the demo, or of a resumed
            run; None if a file has the settings.
        is_demo: whether it is the demo's model and text.
        hosts: that share its ranks; None for one host.
        web_port: of the live report; None without one.
    """

    config: RunConfig
    yields_to: tuple[str, ...] | None
    is_demo: bool
    hosts: Hosts | None = None
    web_port: int | None = None

    @property
    def has_no_dp(self) -> bool:
        """Whether ``plan.dp`` was chosen automatically or by the demo."""
        if self.yields_to is None or self.config.plan.dp is None:
            return self.config.plan.dp is None
        return "plan.dp" not in list_named_fields(self.yields_to) and self.config.state.existing != "resume"

    def resolved(self, resolve: Callable[[RunConfig], Resolved]) -> Resolved:
        """The resolved run; settings that the user did not name yield to those that he did. Raises as
        ``resolve`` does.
        """
        return resolve(self.config) if self.yields_to is None else settle(self.config, self.yields_to, resolve)


def read(argv: Sequence[str]) -> TrainArgs:
    """The run of a command line.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: after printing help.
    """
    argv = [f"--observe.{word[2:]}" if word.partition("=")[0] == "--profile" else word for word in argv]
    if argv and not argv[0].startswith("-"):
        options = _flags(read_run(Path(argv[0])), argv[1:])
        return TrainArgs(
            RunConfig(**sections_of(options)),
            None,
            is_demo=False,
            hosts=hosts_of(options),
            web_port=web_port_of(options),
        )
    options = _flags(DEMO, argv)
    saved = Path(options.state.dir) / "run.toml"
    if options.state.existing == "resume" and saved.is_file():
        # A resumed run keeps its own settings; flags still change them.
        options = _flags(read_config(saved), argv)
    is_demo = options.model == DEMO.model and options.data.corpus == DEMO.data.corpus
    return TrainArgs(RunConfig(**sections_of(options)), tuple(argv), is_demo, hosts_of(options), web_port_of(options))


def _flags(base: RunConfig, argv: Sequence[str]) -> HostsOptions:
    options, prog = HostsOptions(**sections_of(base)), "superstep train [run.toml]"
    return read_flags(options, argv, prog=prog, description=DESCRIPTION, common=COMMON)
