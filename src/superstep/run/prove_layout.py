"""One layout proven against the reference: what it is proven on, and the ranks that are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from superstep.errors import StateError
from superstep.launch.ranks import World, launch_on
from superstep.plan.resolution.resolve import Resolved
from superstep.train.proof.proof_inputs import Cases, ProofCase, prove_case
from superstep.train.proof.prove_tolerance import ProofVerdict


@contextmanager
def proof_case(run: Resolved, corpus: Path, *, steps: int) -> Iterator[ProofCase]:
    """What one layout is proven on, as long as its files are there.

    Raises:
        StateError: the disk has no room for them.
    """
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder, disk_named(Path(folder)):
        yield Cases(Path(folder), corpus, steps=steps).case(run, reruns=True)


@contextmanager
def disk_named(folder: Path) -> Iterator[None]:
    """Within the block a disk that is full is reported as what it is: a StateError that names the folder."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{folder} cannot hold the reference: {error.strerror}; free space there.") from error


def prove_layout(case: ProofCase) -> ProofVerdict:
    """Run a layout on ranks of its own beside the reference."""
    return launch_on(case.run.config.plan.device, case.run.plan.mesh.world, _rank, case)


def _rank(world: World, case: ProofCase) -> ProofVerdict:
    return prove_case(world, case)
