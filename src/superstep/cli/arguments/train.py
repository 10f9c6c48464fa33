"""What superstep train is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from superstep.cli.options import DEMO, flags, read_run, settled
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Resolved
from superstep.plan.toml import read_config

DESCRIPTION = "Train a model. Without a run.toml: a demo, two ranks on the source text of Python's own library."


@dataclass(frozen=True, slots=True)
class Asked:
    """A run as the command line has it.

    Attributes:
        yields_to: the flags, where they change settings that the user has not written himself: those of the demo, or
            of a run that goes on; None where a file says what to do.
        is_demo: whether it is the demo's model and text.
    """

    config: RunConfig
    yields_to: tuple[str, ...] | None
    is_demo: bool

    def resolved(self, resolve: Callable[[RunConfig], Resolved]) -> Resolved:
        """The run, with what nobody asked for out of the way of what was; raises as ``resolve`` does."""
        return resolve(self.config) if self.yields_to is None else settled(self.config, self.yields_to, resolve)


def read(argv: Sequence[str]) -> Asked:
    """The run that a command line asks for.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    if argv and not argv[0].startswith("-"):
        config = flags("train", read_run(Path(argv[0])), argv[1:], description=DESCRIPTION)
        return Asked(config, None, is_demo=False)
    config = flags("train", DEMO, argv, description=DESCRIPTION)
    saved = Path(config.state.dir) / "run.toml"
    if config.state.existing == "resume" and saved.is_file():
        # A run that goes on keeps its own settings; flags still change them.
        config = flags("train", read_config(saved), argv, description=DESCRIPTION)
    is_demo = config.model == DEMO.model and config.data.corpus == DEMO.data.corpus
    return Asked(config, tuple(argv), is_demo)
