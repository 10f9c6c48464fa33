"""GradeConfig: limits of a grade, and how candidates' programs are isolated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superstep.errors import ConfigError

Kept = Literal["bubblewrap", "none"]

LEAST_BYTES = 32 << 20
"""Python alone takes about 20 MiB of address space, and a program needs some too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeConfig:
    """Limits of a grade, and how candidates' programs are isolated."""

    sandbox: Kept = "bubblewrap"
    """bubblewrap isolates each program in its own namespaces; none runs it as this user, with all of the user's rights.
    """
    timeout_s: float = 10.0
    """Seconds that a candidate's program, or reading its answer, may take."""
    grader_timeout_s: float = 60.0
    """Seconds that a whole grade may take before its grader is killed; more than `timeout_s`."""
    memory_bytes: int = 512 << 20
    """Memory of a program's processes together; each of them may address as much."""
    disk_bytes: int = 16 << 20
    """Size of a program's own folder, which is in memory and removed after the run."""
    output_bytes: int = 1 << 20
    """The most bytes that a program may write to its output."""
    processes: int = 32
    """The most processes and threads that a program may have at a time."""
    python: str | None = None
    """Python interpreter for candidates' programs; left out, this interpreter, or else the system's."""
    packages: str | None = None
    """Folder of packages that programs may import, made by `pip install --target`; left out, only the standard library.
    """
    workers: int | None = None
    """Graders at a time; left out, one for each core."""
    retries: int = 2
    """How often an answer is graded again after a grader_error."""


def check_config(config: GradeConfig) -> GradeConfig:
    """Return the config after checking that its numbers work; raises ConfigError otherwise."""
    for name, value in (("timeout_s", config.timeout_s), ("grader_timeout_s", config.grader_timeout_s)):
        if not 0 < value <= 86_400:
            raise ConfigError(f"grade.{name} = {value:g} must be above 0 and at most 86400.")
    if config.grader_timeout_s <= config.timeout_s:
        raise ConfigError(
            f"grade.grader_timeout_s = {config.grader_timeout_s:g} must be more than grade.timeout_s = "
            f"{config.timeout_s:g}; set it to {config.timeout_s * 2 + 5:g}."
        )
    for name, number, least in (
        ("memory_bytes", config.memory_bytes, LEAST_BYTES),
        ("disk_bytes", config.disk_bytes, 4096),
        ("output_bytes", config.output_bytes, 1024),
        ("processes", config.processes, 1),
        ("workers", config.workers if config.workers is not None else 1, 1),
        ("retries", config.retries, 0),
    ):
        if number < least:
            raise ConfigError(f"grade.{name} = {number} must be at least {least}.")
    return config
