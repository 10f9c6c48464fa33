"""superstep train --web: the live report of a run on loopback, from the files that the run writes anyway."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from superstep.errors import ConfigError
from superstep.observe.page.live_server import LiveServer, ServedPage
from superstep.observe.page.report import ReportedRun, pack_runs, report_page
from superstep.observe.prometheus import exposition
from superstep.observe.tail_jsonl import GrowingFile
from superstep.run.reports.report import facts, read_recorded
from superstep.train.run_folder.run_paths import RunFolder

TOKEN = "SUPERSTEP_WEB_TOKEN"
"""The environment variable of the token, for clients of many runs."""
FEWEST_BYTES = 16


@contextmanager
def web(port: int | None) -> Iterator[Callable[[RunFolder], None]]:
    """Hold the port within the block; it answers once the yielded function is called with the run's folder.

    Args:
        port: to listen on, 0 for any free one; None serves nothing.

    Raises:
        ConfigError: the port cannot be opened.
    """
    if port is None:
        yield lambda _: None
        return
    served = LiveServer(port, _token())
    try:
        yield lambda folder: _begin(served, folder)
    finally:
        served.close()


def _begin(served: LiveServer, folder: RunFolder) -> None:
    served.begin(LiveReport(folder).make_page())
    say(f"live report: {served.url}")
    is_own = TOKEN in os.environ
    say(f"its token: {f'that of {TOKEN}' if is_own else f'the end of that address; {TOKEN} sets one that stays'}")


def say(text: str) -> None:
    print(text, flush=True)


def require_token() -> None:
    """Check the length of the environment's token, if set.

    Raises:
        ConfigError: it is too short.
    """
    token = os.environ.get(TOKEN)
    if token is not None and len(token) < FEWEST_BYTES:
        raise ConfigError(
            f"{TOKEN} has {len(token)} characters, but needs at least {FEWEST_BYTES}; make one with openssl rand -hex "
            "16 or leave it out."
        )


def _token() -> str:
    require_token()
    return os.environ.get(TOKEN) or secrets.token_urlsafe(FEWEST_BYTES)


class LiveReport:
    """The report of a run, which may not have begun yet.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._growing, self._samples = folder, GrowingFile(folder.metrics), GrowingFile(folder.samples)

    def make_page(self) -> ServedPage:
        """The served content."""
        return ServedPage(
            page=lambda: report_page([self._read_run()], is_live=True),
            stamp=self._stamp,
            update=lambda: pack_runs([self._read_run()]),
            metrics=self._metrics,
        )

    def _read_run(self) -> ReportedRun:
        settings = self._folder.config.read_text(encoding="utf-8") if self._folder.config.is_file() else ""
        return ReportedRun(
            name=str(self._folder.root),
            lines=self._growing.read(),
            samples=self._samples.read(),
            settings=settings,
            ran=read_recorded(self._folder),
            damage=self._growing.damage(),
            facts=facts(),
        )

    def _stamp(self) -> object:
        return tuple((stat.st_ino, stat.st_size) for stat in self._stats())

    def _metrics(self) -> str:
        updated_at_s = max((stat.st_mtime for stat in self._stats()), default=None)
        return exposition(str(self._folder.root), self._growing.read(), updated_at_s=updated_at_s)

    def _stats(self) -> list[os.stat_result]:
        stats = []
        for path in (self._folder.metrics, self._folder.samples):
            with suppress(OSError):
                stats.append(path.stat())
        return stats
