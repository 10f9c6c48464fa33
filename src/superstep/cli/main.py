"""superstep VERB ...: picks the verb, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from superstep.cli import sample, view
from superstep.cli.measure import verb as measure
from superstep.cli.plan import verb as plan
from superstep.cli.prove import verb as prove
from superstep.cli.scaling import verb as scaling
from superstep.cli.train import verb as train
from superstep.errors import SuperstepError, UserError, did_you_mean

VERBS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train.main, "train a model; with no argument, a demo on the source text of Python's library"),
    "plan": (plan.main, "rank every layout of a model on a cluster: step time, memory, days, price"),
    "prove": (prove.main, "compare a layout with a one-process reference, tensor by tensor"),
    "view": (view.main, "show a step as a timeline, from a run.toml or as a run recorded it"),
    "measure": (measure.main, "measure this machine, and write what was found as a cluster file"),
    "scaling": (scaling.main, "fit laws of the loss to your runs; the best model for a budget"),
    "sample": (sample.main, "write text with a trained run"),
}

USAGE = "\n".join(
    [
        "usage: superstep VERB ...",
        "",
        *(f"  {verb:8}{what}" for verb, (_, what) in VERBS.items()),
        "",
        "superstep VERB --help says more.",
    ]
)


def main(argv: Sequence[str]) -> int:
    """Run one verb.

    Returns:
        The exit status: 0 done, 1 a fault or a proof that failed, 2 a user's mistake, 130 interrupted.
    """
    try:
        return _reported(argv)
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the reader of our output has left; the interpreter would complain of it at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] not in VERBS:
        raise UserError(f"unknown verb '{argv[0]}'{did_you_mean(argv[0], VERBS)}")
    return VERBS[argv[0]][0](argv[1:])


def _reported(argv: Sequence[str]) -> int:
    """The exit status; where the verb cannot do its work, one line says why."""
    try:
        return _run(argv)
    except UserError as error:
        print(f"superstep: {error}", file=sys.stderr)
        return error.exit_status
    except SuperstepError as error:
        print(f"superstep: fault: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("superstep: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as `| head` does when it has seen enough
        return 1
    except OSError as error:
        print(f"superstep: fault: {error}.", file=sys.stderr)
        return 1


def entry() -> None:
    """The console script."""
    # Ranks of one host meet on its loopback, whatever its name resolves to; those of torchrun choose for themselves.
    if "RANK" not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, _terminate)
    sys.exit(main(sys.argv[1:]))


def _terminate(number: int, frame: FrameType | None) -> None:
    # An exception, so that the terminal is restored and ranks are ended on the way out.
    raise SystemExit(128 + number)
