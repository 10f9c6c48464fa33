"""Several hosts on this machine: network namespaces with a link between them, and a launcher in each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from superstep.monitor.status_page import NAME
from superstep.observe.jsonl import read

SECRET = "a secret that only these hosts know"
PORT = 29400


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"ss{os.getpid()}-try"
    try:
        if _ip("netns", "add", name, check=False).returncode:
            return "this machine makes no network namespaces"
        veth = _ip("link", "add", f"{name}0"[-15:], "type", "veth", "peer", "name", f"{name}1"[-15:], check=False)
        _ip("link", "del", f"{name}0"[-15:], check=False)
        return "this machine makes no links between network namespaces" if veth.returncode else ""
    finally:
        _ip("netns", "del", name, check=False)


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Several:
    """Two hosts, 10.77.0.1 and 10.77.0.2, until the block ends: then nothing of them is left.

    Args:
        folder: where launchers work.
        flags: of each launcher.
        command: what Python is to run; the launcher as it is, or one for tests.
        verb: what the launchers do, and with which file.
    """

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        command: Sequence[str] = ("-m", "superstep"),
        verb: Sequence[str] = ("train", "run.toml"),
    ) -> None:
        self.folder, self.flags, self.command, self.verb = folder, flags, command, verb
        self.names = [f"ss{os.getpid()}h{host}" for host in range(2)]
        self.links = [f"ss{os.getpid()}v{host}" for host in range(2)]
        self.launchers: dict[int, subprocess.Popen] = {}
        self.said: list[Path] = []

    def __enter__(self) -> Several:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
                _ip("link", "set", link, "netns", name)
                _ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(2):
            self.kill(host)
        for name in self.names:
            _ip("netns", "del", name, check=False)
        _ip("link", "del", self.links[0], check=False)

    def start(self, host: int, *more: str, secret: str = SECRET) -> subprocess.Popen:
        """Start the launcher of a host."""
        number = len(self.said)
        self.said.append(self.folder / f"said-{number}")
        command = [sys.executable, *self.command, *self.verb, *self.flags, "--hosts", "2"]
        command += ["--host", str(host), "--meet", f"10.77.0.1:{PORT}", *more]
        inside = ["ip", "netns", "exec", self.names[host], *command]
        environment = os.environ | {"SUPERSTEP_SECRET": secret, "OMP_NUM_THREADS": "1"}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        with self.said[-1].open("wb") as out:
            self.launchers[host] = subprocess.Popen(
                inside, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        return self.launchers[host]

    def pids(self, host: int) -> list[int]:
        """The processes of a host."""
        return [int(word) for word in _ip("netns", "pids", self.names[host], check=False).stdout.split()]

    def ranks(self, host: int) -> list[int]:
        """Its ranks: what has the page where a rank tells what it does, and is not the launcher."""
        others = [pid for pid in self.pids(host) if pid != self.launchers[host].pid]
        return sorted(pid for pid in others if any(NAME in line for line in _maps(pid)))

    def limit(self, rate: str) -> None:
        """Have what each host sends to the other go no faster: a rate as tc(8) writes it, ``1gbit``."""
        for name, link in zip(self.names, self.links, strict=True):
            bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", link, "root", *bucket)

    def kill(self, host: int) -> None:
        """End a whole host at once: its launcher, its ranks, and with them their memory."""
        for _ in range(3):
            for pid in self.pids(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if host in self.launchers:
            self.launchers[host].wait()

    def cut(self, host: int) -> None:
        """Take its link down."""
        _ip("-n", self.names[host], "link", "set", self.links[host], "down")

    def heal(self, host: int) -> None:
        """And up again."""
        _ip("-n", self.names[host], "link", "set", self.links[host], "up")

    def blackhole(self, host: int) -> None:
        """Have all that it sends to the other go nowhere, without a word."""
        _ip("-n", self.names[host], "route", "add", "blackhole", f"10.77.0.{2 - host}/32")

    def find_again(self, host: int) -> None:
        """No more."""
        _ip("-n", self.names[host], "route", "del", "blackhole", f"10.77.0.{2 - host}/32")

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit statuses of the launchers."""
        deadline_s = time.monotonic() + seconds
        return [self.launchers[host].wait(max(0.1, deadline_s - time.monotonic())) for host in sorted(self.launchers)]

    def output(self) -> str:
        """What all launchers have said."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in self.said)

    def until(self, is_so: Callable[[], bool], seconds: float = 120) -> float:
        """Wait for something; the seconds since 1970 when it was so."""
        deadline_s = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline_s, self.output()
            for launcher in self.launchers.values():
                assert launcher.poll() in (None, 0, -signal.SIGKILL), self.output()
            time.sleep(0.02)
        return time.time()


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


def told(folder: Path, event: str) -> list[dict]:
    """A run's metrics of one kind so far."""
    path = folder / "metrics.jsonl"
    return [line for line in read(path) if line["event"] == event] if path.exists() else []


def losses(folder: Path) -> list[tuple]:
    """Of each step: its number, loss and gradient norm."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in told(folder, "step")]
