"""superstep VERB ...: runs the verb, and turns errors into one line and an exit status."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import superstep
from superstep.cli.flags.options import asks_for_help, asks_for_hosts
from superstep.errors import SuperstepError, UserError, did_you_mean, disk_fault


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, by name: it is imported only on use, because most verbs need torch.

    Attributes:
        module: its ``main`` takes the arguments and returns the exit status.
        extra: of the package, with the verb's additional dependencies; empty without any.
        arguments: the module with a ``read`` without torch; None if ``main`` reads them.
        launches: whether it may launch ranks, as decided by ``cli.before_torch.preload_torch``, which reads them too.
    """

    what: str
    module: str
    arguments: str | None = None
    extra: str = ""
    launches: bool = False


VERBS = {
    "train": Verb(
        "train a model; without arguments, train a demo on the source of Python's standard library",
        "superstep.cli.train.train",
        "superstep.cli.arguments.train",
        launches=True,
    ),
    "tune": Verb(
        "post-train a model: on answers (sft), on preferences (dpo) or on rewards (rl); merge an adapter into its "
        "base model; serve Tinker's client",
        "superstep.cli.tune.tune",
        "superstep.cli.arguments.tune.tune",
        extra="serve",
        launches=True,
    ),
    "plan": Verb(
        "rank every layout of a model on a cluster by step time, memory, days and price", "superstep.cli.plan.plan"
    ),
    "prove": Verb(
        "compare a layout with a one-process reference, tensor by tensor",
        "superstep.cli.prove.prove",
        "superstep.cli.arguments.prove",
        launches=True,
    ),
    "view": Verb(
        "draw a step as a timeline: the predicted step of a run.toml, or the recorded step of a run",
        "superstep.cli.view.view",
        "superstep.cli.arguments.view",
    ),
    "doctor": Verb(
        "diagnose a live or a failed run: which rank waits for which, hangs, slow ranks, memory, disk",
        "superstep.cli.doctor.doctor",
        "superstep.cli.arguments.doctor",
    ),
    "trace": Verb(
        "write the times of all instructions in the last steps of a live or a failed run",
        "superstep.cli.trace",
        "superstep.cli.arguments.trace",
    ),
    "compare": Verb(
        "compare runs: their curves, the settings that differ, and whether the losses differ",
        "superstep.cli.compare",
        "superstep.cli.arguments.compare",
    ),
    "measure": Verb(
        "measure the rates of this machine and write them as a cluster file",
        "superstep.cli.measure.measure",
        "superstep.cli.arguments.measure",
    ),
    "scaling": Verb(
        "fit scaling laws to your runs and compute the best model for a budget", "superstep.cli.scaling.scaling"
    ),
    "serve": Verb(
        "serve a trained run or a Hugging Face folder over HTTP",
        "superstep.cli.serve.serve",
        "superstep.cli.arguments.serve",
        extra="serve",
        launches=True,
    ),
    "grade": Verb(
        "serve your graders over HTTP, or attack them before training does",
        "superstep.cli.grade.grade",
        "superstep.cli.arguments.grade",
        extra="grade",
    ),
    "chat": Verb(
        "chat in the terminal with a model on this machine, or with a server",
        "superstep.cli.chat.chat",
        "superstep.cli.arguments.chat",
        extra="serve",
    ),
    "checkpoint": Verb(
        "list the checkpoints of a run, verify every byte of them, or export the weights for other tools",
        "superstep.cli.checkpoint",
        "superstep.cli.arguments.checkpoint",
    ),
    "sample": Verb("continue a text with a trained run", "superstep.cli.sample", "superstep.cli.arguments.sample"),
}


def usage() -> str:
    """The page of all verbs, as wide as the terminal."""
    columns = max(24, min(shutil.get_terminal_size().columns, 100))
    lines = [
        textwrap.fill(verb.what, columns, initial_indent=f"  {name:10}  ", subsequent_indent=" " * 14)
        for name, verb in VERBS.items()
    ]
    last = textwrap.fill("superstep VERB --help explains a verb; superstep --version prints the version.", columns)
    return "\n".join(["usage: superstep VERB ...", "", *lines, "", last])


def main(argv: Sequence[str]) -> int:
    """Run one verb.

    Returns:
        The exit status: 0 done, 1 a fault or a failed proof, 2 a user's mistake, 130 interrupted, 143 terminated.
    """
    # cuBLAS reads it at its first product, in this process and in later ranks: it decides the order of sums.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        return report(lambda: _run(argv))
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the reader of our output has left; the interpreter would report it at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"superstep {superstep.__version__}")
        return 0
    if argv[0] not in VERBS:
        raise UserError(f"unknown verb '{argv[0]}'{did_you_mean(argv[0], VERBS)}")
    verb, rest = VERBS[argv[0]], argv[1:]
    if verb.arguments is not None and (asks_for_help(rest) or not verb.launches):
        importlib.import_module(verb.arguments).read(rest)  # report mistakes before the verb imports torch
    if verb.launches:
        importlib.import_module("superstep.cli.before_torch.preload_torch").begin(argv[0], rest)
    status: int = _import_verb(argv[0], verb).main(rest)
    return status


def _import_verb(name: str, verb: Verb) -> Any:  # noqa: ANN401 - modules have no type that says what is in them
    """The module of a verb.

    Raises:
        UserError: its extra is not installed.
    """
    try:
        return importlib.import_module(verb.module)
    except ModuleNotFoundError as error:
        if not verb.extra or (error.name or "").startswith("superstep"):
            raise
        raise UserError(
            f"superstep {name} needs {error.name}, which is not installed: pip install 'superstep[{verb.extra}]'."
        ) from error


def report(call: Callable[[], int]) -> int:
    """The exit status; an error is printed in one line."""
    try:
        return call()
    except UserError as error:
        print(f"superstep: {error}", file=sys.stderr)
        return error.exit_status
    except SuperstepError as error:
        print(f"superstep: fault: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("superstep: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as `| head` does
        return 1
    except OSError as error:
        print(f"superstep: fault: {disk_fault(error, 'a file', what='used')}", file=sys.stderr)
        return 1


def settle() -> None:
    """Prepare the process of a command before its verb."""
    # Ranks of one host meet on its loopback, whatever its name resolves to; those of torchrun choose for themselves,
    # and those of several launchers get an address.
    if asks_for_hosts(sys.argv):
        # The ranks' store warns about each address without a name. Torch reads this when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    elif "RANK" not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # Its profiler writes to stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
            signal.signal(number, _terminate)


def entry() -> None:
    """The console script."""
    settle()
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        gc.freeze()  # at its end Python would search all of torch for cycles, which takes a second


def _terminate(number: int, frame: FrameType | None) -> None:
    # An exception, so that the terminal is restored and ranks are ended on the way out.
    raise SystemExit(128 + number)
