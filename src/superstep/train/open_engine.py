"""The engine of a run on this rank: its process groups and its units."""

from __future__ import annotations

from datetime import timedelta

from superstep.comm.mesh import Mesh, build_mesh
from superstep.engine.engine import Engine
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.model import units_of

MESH_TIMEOUT = timedelta(minutes=10)


def open_mesh(world: World, run: Resolved) -> Mesh:
    """The process groups of a run's ranks. Every rank calls this together."""
    return build_mesh(run.plan, world.rank, world.device, timeout=MESH_TIMEOUT)


def open_engine(world: World, run: Resolved, *, temperature: float = 1.0) -> Engine:
    """The engine of a run on this rank. Every rank calls this together."""
    return Engine(run, units_of(run), open_mesh(world, run), heart=world.heart, temperature=temperature)
