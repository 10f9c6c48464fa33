"""A rank of the engine in a process of its own: rank 0 serves the HTTP interface, the others follow rank 0."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path

from superstep.comm.mesh import build_mesh
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.serve.build_engine import open_both
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig, plan_of
from superstep.serve.drafting.grammar_protocol import Matcher
from superstep.serve.engine import InferenceEngine
from superstep.serve.engine_control import EngineController
from superstep.serve.load_rank import KnownModel, load_rank, share_cores
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import ORDERS, REPORTS
from superstep.serve.scheduling.request import Request

WAIT_S = 20.0
"""How long rank 0 waits for a message before it signals the others that it is alive."""

Forms = Callable[[Path, int], Callable[[Request], Matcher | None]]


def serve_rank(
    world: World, folder: Path, serve: ServeConfig, address: str, forms: Forms | None, weights: Path | None = None
) -> None:
    """The work of a launched rank until it is told to leave.

    Args:
        world: the launched ranks.
        folder: of the model.
        serve: settings.
        address: of rank 0's socket for messages.
        forms: makes the matchers of answers, from the folder and the vocabulary's size.
        weights: their folder, if not the model's.
    """
    run = plan_of(folder, serve)
    share_cores(world, serve)
    known = KnownModel(run=run, weights=weights)
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
    try:
        if world.rank > 0:
            assert mesh.tp is not None, "ranks share the model"
            mine = load_rank(folder, serve, world.rank, mesh.tp, world.device, known)
            follow(mine.forward, mesh.tp, world.device, mine.party, mine.small)
            return
        matchers = None if forms is None else forms(folder, run.shape.vocab)
        engine, steward = open_both(folder, serve, tp=mesh.tp, device=world.device, matchers=matchers, known=known)
        with Client(address) as pipe:
            pipe.send_bytes(REPORTS.encode(messages.Ready(engine.info, engine.adapters.all)))
            obey(engine, steward, pipe)
    finally:
        mesh.destroy()


def obey(engine: InferenceEngine, steward: EngineController, pipe: Connection) -> None:
    """Messages in, updates out, until the other end leaves."""
    while True:
        while pipe.poll(WAIT_S if engine.is_idle and not steward.is_busy else 0):
            try:
                order = ORDERS.decode(pipe.recv_bytes())
            except EOFError:
                order = messages.EndEngine()
            match order:
                case messages.AddRequest(request):
                    try:
                        engine.add(request)
                    except ConfigError as error:
                        pipe.send_bytes(REPORTS.encode(messages.RequestRefused(request.id, str(error))))
                case messages.AbortRequests(requests):
                    for number in requests:
                        engine.abort(number)
                case messages.RunCommand(number, command):
                    steward.ask(number, command)
                case messages.EndEngine():
                    engine.end()
                    return
        for done in steward.tick():
            pipe.send_bytes(REPORTS.encode(done))
        if engine.is_idle:
            engine.wait()
            steward.rest()
            continue
        progress = engine.step()
        pipe.send_bytes(REPORTS.encode(messages.StepOutput(tuple(progress), engine.counters)))
