"""The HTTP application of a grading server: grades of one environment.

    POST /grade          {"index", "seed", "answer"}      ->  {"verdict", "score", "why"}
    POST /grade/batch    {"items": [...]}                 ->  {"verdicts": [...]}, in the order of the items
    GET  /health         whether the server accepts requests
    GET  /metrics        numbers for Prometheus

The expected answer is never sent by the client: graders make the task again from its index and seed.
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
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict
from superstep.grade.workers.pool import Pool
from superstep.http import app as http_app
from superstep.http.app import ErrorResponses, Routes, metrics_response
from superstep.http.body_validation import read_model
from superstep.http.drain import Drain
from superstep.http.guard import Entrance
from superstep.http.limits import BodyLimits, Queue, read_json
from superstep.http.request_error import RequestError
from superstep.http.sse import until_gone

QUEUE = 4096
"""The most grades that run or wait, of all clients together."""


@dataclass(frozen=True, slots=True)
class GradeService:
    pool: Pool
    metrics: GradeMetrics
    limits: BodyLimits
    queue: Queue
    drain: Drain

    async def verdicts(self, items: list[Item], rollouts: list[Rollout]) -> list[Verdict]:
        with self.queue.place(len(items)), self.metrics.running.track_inprogress():
            pending = [self._verdict(item, rollout) for item, rollout in zip(items, rollouts, strict=True)]
            return list(await asyncio.gather(*pending))

    async def _verdict(self, item: Item, rollout: Rollout) -> Verdict:
        began = time.monotonic()
        verdict = await asyncio.wrap_future(self.pool.submit(item.index, item.seed, rollout))
        self.metrics.count_grade(verdict, time.monotonic() - began)
        return verdict


def make_app(
    pool: Pool,
    metrics: GradeMetrics,
    *,
    limits: BodyLimits | None = None,
    queue: int = QUEUE,
    entrance: Entrance | None = None,
) -> Starlette:
    """Build the application of one pool of graders.

    Args:
        limits: of request bodies; None means the defaults.
        queue: the most grades that run or wait.
        entrance: checks before the handlers; None accepts loopback host names only.
    """
    limits, entrance = limits or BodyLimits(), entrance or Entrance()
    service = GradeService(pool, metrics, limits, Queue(queue), entrance.drain)

    def refuse(error: RequestError) -> Response:
        metrics.refused.labels(str(error.status)).inc()
        return error.response()

    return http_app.make_app(
        ROUTES,
        service,
        entrance=entrance,
        errors=ErrorResponses(refuse=refuse, convert=_of_file),
        limits=limits,
    )


async def grade(request: Request, service: GradeService) -> Response:
    item = read_model(Item, await read_json(request, service.limits))
    (verdict,) = await until_gone(request, service.verdicts([item], [item.rollout()]))
    return JSONResponse(verdict.to_json())


async def grade_batch(request: Request, service: GradeService) -> Response:
    batch = read_model(GradeBatch, await read_json(request, service.limits))
    verdicts = await until_gone(request, service.verdicts(batch.items, batch.rollouts()))
    return JSONResponse({"verdicts": [verdict.to_json() for verdict in verdicts]})


async def health(request: Request, service: GradeService) -> Response:
    """Answer 200, or 503 while the server drains."""
    state = "draining" if service.drain.is_begun else "ready"
    fields = {"status": state, "workers": service.pool.workers, "sandbox": service.pool.config.sandbox}
    fields["memory_bound"] = service.pool.memory_bound
    return JSONResponse(fields, status_code=503 if service.drain.is_begun else 200)


async def numbers(request: Request, service: GradeService) -> Response:
    return metrics_response(service.metrics.registry)


def _of_file(error: SuperstepError) -> RequestError:
    """The environment has no such task: the server's fault (5xx), not the client's."""
    is_file = isinstance(error, ConfigError)
    return RequestError(str(error), status=500, code="task_failed" if is_file else "grader_failed")


ROUTES: Routes[GradeService] = (
    ("POST", "/grade", grade),
    ("POST", "/grade/batch", grade_batch),
    ("GET", "/health", health),
    ("GET", "/metrics", numbers),
)
