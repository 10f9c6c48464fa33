"""Ranks as srun starts them: by nobody who imports torch for them, of which they are forks here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pool import IMPORTED
from superstep.cli.main import entry
from superstep.launch.fork_server import LauncherState, fork_context, place_at


def nothing(rank: int) -> None:
    """Plants nothing."""


def join_ranks(
    folder: Path, argv: Sequence[str], ranks: int = 2, plant: Callable[[int], None] = nothing
) -> tuple[list[int | None], str]:
    """The exit statuses of a command's ranks, and what they said on stderr.

    Args:
        folder: for what each of them says.
        argv: of the command.
        ranks: so many.
        plant: called on each rank before the command, with its number.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        its = replace(place_at(folder / f"said-{rank}"), environment=shared | {"RANK": str(rank)})
        processes.append(fork_context(IMPORTED).Process(target=_join, args=(its, list(argv), rank, plant)))
        processes[-1].start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes], "".join(
        (folder / f"said-{rank}").read_text() for rank in range(ranks)
    )


def _join(place: LauncherState, argv: list[str], rank: int, plant: Callable[[int], None]) -> None:
    place.take()
    sys.argv = ["superstep", *argv]
    plant(rank)
    entry()
