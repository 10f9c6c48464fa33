"""A served model on ranks that share it: rank 0 asks, the others follow it to the end."""

from contextlib import contextmanager

from superstep.comm.mesh import build_mesh
from superstep.serve.build_engine import open_both
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import plan_of
from superstep.serve.load_rank import load_rank
from superstep.train.proof.prove_tolerance import TIMEOUT


@contextmanager
def served_by(rank, folder, serve, device):
    """The engine and its steward on rank 0. On the others None twice, once they have followed rank 0."""
    mesh = build_mesh(plan_of(folder, serve).plan, rank, device, timeout=TIMEOUT)
    try:
        if rank == 0:
            engine, steward = open_both(folder, serve, tp=mesh.tp, device=device)
            yield engine, steward
            engine.end()
        else:
            mine = load_rank(folder, serve, rank, mesh.tp, device)
            follow(mine.forward, mesh.tp, device, mine.party, mine.small)
            yield None, None
    finally:
        mesh.destroy()
