"""Arguments of a run's launcher, besides those of the run: several hosts, which get equal flags except for their
number, and a page that is served during training.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import ConfigError, UserError
from superstep.plan.config import RunConfig
from superstep.run.hosts.hosts import Hosts

SECRET = "SUPERSTEP_SECRET"
FEWEST_BYTES = 16
PORT = 29600
"""Port of host 0 under torchrun, which uses its own port itself."""

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """The hosts of a run."""

    hosts: str | None = None
    """How many hosts share the ranks, each with a launcher that is started by the same command; torchrun takes their
    number, and this one's, from its environment, with one process for each host.
    """
    host: int | None = None
    """The number of this host; host 0 is the coordinator."""
    meet: str | None = None
    """The address and port of host 0, as 10.0.0.1:29400."""
    secret_file: str | None = None
    """A file with the run's secret, 16 bytes or more; none uses SUPERSTEP_SECRET in the environment."""
    patience: float = 600.0
    """Seconds to wait for a host that is lost, or has not come yet."""
    without_after: float = 5.0
    """With train.elastic: seconds to wait for a lost host before the others continue without it."""


@dataclass(frozen=True, kw_only=True)
class WebFlags:
    """The live page of a run."""

    web: bool = False
    """Serve the run's report on this host while it trains, with live updates, and metrics for Prometheus. Requests need
    its token: what follows token= in the address that is printed, and the value of SUPERSTEP_WEB_TOKEN in the
    environment if that is set. It is in no file."""
    web_port: int = 0
    """The port of the report; 0 takes any free one."""


@dataclass(frozen=True, kw_only=True)
class HostsOptions(HostFlags, WebFlags, RunConfig):
    """A run with its hosts and its live page."""


def web_port_of(options: HostsOptions) -> int | None:
    """The port of the live page; None without one.

    Raises:
        ConfigError: it is no port, or there is no page to serve.
    """
    if not 0 <= options.web_port < 2**16:
        raise ConfigError(
            f"--web-port = {options.web_port} is not a port; choose one from 1 to 65535, or 0 for any free port."
        )
    if not options.web:
        if options.web_port:
            raise ConfigError(f"--web-port = {options.web_port} needs --web.")
        return None
    return options.web_port


def hosts_of(options: HostFlags, environment: Mapping[str, str] = os.environ) -> Hosts | None:
    """The hosts; None for one host.

    Raises:
        ConfigError: a flag is wrong, or missing.
    """
    if options.hosts is None:
        for flag, value in (("host", options.host), ("meet", options.meet), ("secret-file", options.secret_file)):
            if value is not None:
                raise ConfigError(f"--{flag} = {value} needs --hosts; give the number of hosts, as --hosts 2.")
        return None
    number, count, meet = _places(options, environment)
    if count < 2 or not 0 <= number < count:
        raise ConfigError(
            f"--hosts = {count}, --host = {number}: --hosts must be at least 2, and --host must be from 0 to --hosts - "
            "1; leave both out for one host."
        )
    if options.patience <= 0:
        raise ConfigError(f"--patience = {options.patience:g} must be above 0; it is in seconds.")
    if options.without_after < 0:
        raise ConfigError(f"--without-after = {options.without_after:g} must be at least 0; it is in seconds.")
    return Hosts(
        number=number,
        count=count,
        meet=meet,
        secret=_secret(options.secret_file, environment),
        patience_s=options.patience,
        without_s=options.without_after,
    )


def _places(options: HostFlags, environment: Mapping[str, str]) -> tuple[int, int, tuple[str, int]]:
    if options.hosts == "torchrun":
        if missing := [name for name in TORCHRUN if name not in environment]:
            raise ConfigError(f"--hosts torchrun needs torchrun's environment variables, but {missing[0]} is not set.")
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise ConfigError("--hosts torchrun needs one process for each host: torchrun --nproc-per-node 1.")
        meet = options.meet or f"{environment['MASTER_ADDR']}:{PORT}"
        return int(environment["RANK"]), int(environment["WORLD_SIZE"]), _meet(meet)
    if not str(options.hosts).isdecimal():
        raise ConfigError(f"--hosts = {options.hosts} is not a number; give the number of hosts, or torchrun.")
    if options.host is None or options.meet is None:
        flag = "--host, the number of this host" if options.host is None else "--meet, the address of host 0"
        raise ConfigError(f"--hosts = {options.hosts} needs {flag}: --hosts 2 --host 1 --meet 10.0.0.1:29400.")
    return options.host, int(str(options.hosts)), _meet(options.meet)


def _meet(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--meet = {text} is not an address with a port; write it as 10.0.0.1:29400.")
    return host.strip("[]"), int(port)


def _secret(file: str | None, environment: Mapping[str, str]) -> bytes:
    mend = f"make one with openssl rand -hex 32, and give it to all hosts by --secret-file or {SECRET}."
    if file is None and SECRET not in environment:
        raise ConfigError(f"several hosts need a common secret; {mend}")
    try:
        secret = environment[SECRET].encode() if file is None else _read_private(Path(file))
    except OSError as error:
        raise UserError(f"--secret-file = {file} cannot be read ({error.strerror}); {mend}") from error
    if len(secret) < FEWEST_BYTES:
        raise ConfigError(f"the run's secret has {len(secret)} bytes, but needs at least {FEWEST_BYTES}; {mend}")
    return secret


def _read_private(file: Path) -> bytes:
    """The content of a file that only its owner may read.

    Raises:
        ConfigError: others may.
    """
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"--secret-file = {file} may be read by other users (mode {mode:04o}); run chmod 600 "
            f"{shlex.quote(str(file))}"
        )
    return file.read_bytes().strip()
