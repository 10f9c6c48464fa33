"""The application: grades of one environment over HTTP.

    POST /grade          {"index", "seed", "answer"}      ->  {"verdict", "score", "why"}
    POST /grade/batch    {"items": [...]}                 ->  {"verdicts": [...]}, in the order of the items
    GET  /health         whether grades are given
    GET  /metrics        numbers for Prometheus

What is expected of an answer is never sent: the graders make the task anew from its numbers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superstep.errors import ConfigError, SuperstepError
from superstep.grade.api.fields import GradeBatch, Item
from superstep.grade.api.metrics import GradeMetrics
from superstep.grade.pool import Pool
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict
from superstep.http import app as http_app
from superstep.http.app import Routes, metrics_response
from superstep.http.body_validation import read_model
from superstep.http.drain import Drain
from superstep.http.guard import OPEN_PATHS, Entrance
from superstep.http.limits import BodyLimits, Queue, read_json
from superstep.http.request_error import RequestError
from superstep.http.sse import until_gone

QUEUE = 4096
"""Grades that are under way or wait, of all clients."""


@dataclass(frozen=True, slots=True)
class GradeService:
    """What the handlers share."""

    pool: Pool
    metrics: GradeMetrics
    limits: BodyLimits
    queue: Queue
    drain: Drain

    async def verdicts(self, items: list[Item], rollouts: list[Rollout]) -> list[Verdict]:
        """The verdict of each; all wait for the same graders."""
        with self.queue.place(len(items)), self.metrics.running.track_inprogress():
            asked = [self._verdict(item, rollout) for item, rollout in zip(items, rollouts, strict=True)]
            return list(await asyncio.gather(*asked))

    async def _verdict(self, item: Item, rollout: Rollout) -> Verdict:
        began = time.monotonic()
        verdict = await asyncio.wrap_future(self.pool.submit(item.index, item.seed, rollout))
        self.metrics.graded(verdict, time.monotonic() - began)
        return verdict


def make_app(
    pool: Pool,
    metrics: GradeMetrics,
    *,
    limits: BodyLimits | None = None,
    queue: int = QUEUE,
    entrance: Entrance | None = None,
) -> Starlette:
    """The application of one pool of graders.

    Args:
        pool: the graders.
        metrics: what is counted.
        limits: of requests; the ordinary ones where there are none.
        queue: grades that are under way or wait, at most.
        entrance: what stands before it; None lets loopback names in.
    """
    limits, entrance = limits or BodyLimits(), entrance or Entrance()
    service = GradeService(pool, metrics, limits, Queue(queue), entrance.drain)

    def refuse(error: RequestError) -> Response:
        metrics.refused.labels(str(error.status)).inc()
        return error.response()

    return http_app.make_app(
        ROUTES,
        service,
        middleware=entrance.middleware(refuse, limits, open_paths=OPEN_PATHS),
        refuse=refuse,
        convert=_of_file,
    )


async def grade(request: Request, service: GradeService) -> Response:
    """One verdict."""
    item = read_model(Item, await read_json(request, service.limits))
    (verdict,) = await until_gone(request, service.verdicts([item], [item.rollout()]))
    return JSONResponse(verdict.told())


async def batch(request: Request, service: GradeService) -> Response:
    """Many verdicts."""
    asked = read_model(GradeBatch, await read_json(request, service.limits))
    verdicts = await until_gone(request, service.verdicts(asked.items, asked.rollouts()))
    return JSONResponse({"verdicts": [verdict.told() for verdict in verdicts]})


async def health(request: Request, service: GradeService) -> Response:
    """200 as long as there is anybody to answer it, but for a server that drains."""
    state = "draining" if service.drain.is_begun else "ready"
    told = {"status": state, "workers": service.pool.workers, "sandbox": service.pool.config.sandbox}
    told["memory_bound"] = service.pool.memory_bound
    return JSONResponse(told, status_code=503 if service.drain.is_begun else 200)


async def numbers(request: Request, service: GradeService) -> Response:
    """All numbers, in Prometheus's text form."""
    return metrics_response(service.metrics.registry)


def _of_file(error: SuperstepError) -> RequestError:
    """The environment has no such task, which is not the client's fault."""
    is_file = isinstance(error, ConfigError)
    return RequestError(str(error), status=500, code="task_failed" if is_file else "grader_failed")


ROUTES: Routes[GradeService] = (
    ("POST", "/grade", grade),
    ("POST", "/grade/batch", batch),
    ("GET", "/health", health),
    ("GET", "/metrics", numbers),
)
