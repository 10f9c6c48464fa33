"""Proof of one layout against the reference: its inputs, and the ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from superstep.errors import StateError
from superstep.launch.ranks import World, launch_on
from superstep.plan.resolution.resolve import Resolved
from superstep.train.proof.proof_inputs import Cases, ProofCase, prove_case
from superstep.train.proof.verdict import ProofVerdict


@contextmanager
def proof_case(run: Resolved, corpus: Path, *, steps: int) -> Iterator[ProofCase]:
    """The inputs of a layout's proof, with files for the block.

    Raises:
        StateError: the disk has no room for them.
    """
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder, disk_named(Path(folder)):
        yield Cases(Path(folder), corpus, steps=steps).case(run, reruns=True)


@contextmanager
def disk_named(folder: Path) -> Iterator[None]:
    """Within the block, an error of the disk becomes a StateError that names the folder."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{folder} cannot hold the reference: {error.strerror}; free space there.") from error


def prove_layout(case: ProofCase) -> ProofVerdict:
    """Run the proof of a layout on ranks of its own."""
    return launch_on(case.run.config.plan.device, case.run.plan.mesh.world, _rank, case)


def _rank(world: World, case: ProofCase) -> ProofVerdict:
    return prove_case(world, case)
