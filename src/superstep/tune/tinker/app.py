"""Tinker's HTTP interface for its SDK 0.38: the routes.

Long requests are answered with a number at once; ``/retrieve_future`` waits for the result.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superstep.errors import SuperstepError, UserError
from superstep.http import app as http_app
from superstep.http.app import ErrorResponses, Handler, KeyScheme, Routes, with_key
from superstep.http.body_validation import read_model
from superstep.http.guard import JSON, Entrance
from superstep.http.limits import BodyLimits, parse, read_body, read_json
from superstep.http.request_error import RequestError
from superstep.tune.tinker import request_schema
from superstep.tune.tinker.futures import Outcome, QueueFull, RequestFailed
from superstep.tune.tinker.proto_messages import read_forward_backward
from superstep.tune.tinker.saved_models import place_of
from superstep.tune.tinker.service import TinkerService, UnknownError

M = TypeVar("M", bound=BaseModel)

PROTOBUF = "application/x-protobuf"
ROOT = "/api/v1"
POLL_S = 25.0
"""How long a request for a result is held; the SDK repeats it then."""

LIMITS = BodyLimits(body_bytes=64 << 20)

KEY_SCHEME = KeyScheme(
    lambda request: request.headers.get("x-api-key", ""),
    lambda: RequestError("the key in X-API-Key is not this server's; set TINKER_API_KEY.", status=401),
)

OPEN_PATHS = tuple(ROOT + path for path in ("/healthz", "/session_heartbeat", "/retrieve_future"))
"""Paths that stay open while the server drains, to fetch promised results."""

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # requests run in the order of arrival
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}

NO_HEAD = (
    "train_unembed: the head takes no adapter on this server; the linears of the blocks do, as train_attn and "
    "train_mlp say."
)


def make_app(service: TinkerService, *, key: str | None = None, entrance: Entrance | None = None) -> Starlette:
    """The application.

    Args:
        service: behind it.
        key: that clients must send; None needs none.
        entrance: checks of requests; None admits loopback names.
    """
    entrance = entrance or Entrance()

    async def health(request: Request, service: TinkerService) -> Response:
        if entrance.drain.is_begun:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ok"})

    def guard(handler: Handler[TinkerService]) -> Handler[TinkerService]:
        return handler if key is None else with_key(handler, key, KEY_SCHEME)

    return http_app.make_app(
        [(method, ROOT + path, guard(handler)) for method, path, handler in (("GET", "/healthz", health), *ROUTES)],
        service,
        entrance=entrance,
        errors=ERRORS,
        limits=LIMITS,
        media=(JSON, PROTOBUF),
        open_paths=OPEN_PATHS,
    )


def _convert(error: SuperstepError) -> RequestError:
    statuses: tuple[tuple[type[SuperstepError], int], ...] = ((UnknownError, 404), (QueueFull, 429), (UserError, 400))
    return RequestError(str(error), status=next((status for kind, status in statuses if isinstance(error, kind)), 500))


def _refuse(error: RequestError) -> Response:
    """An error in the format of Tinker's client."""
    return JSONResponse({"detail": error.message}, status_code=error.status, headers=error.headers)


ERRORS = ErrorResponses(
    refuse=_refuse,
    convert=_convert,
    unknown_path=lambda request, error: f"{request.method} {request.url.path} is not here.",
)


async def _body(request: Request, form: type[M]) -> M:
    return read_model(form, await read_json(request, LIMITS))


def _promise(number: str, **more: Any) -> Response:  # noqa: ANN401
    return JSONResponse({"request_id": number, **more})


async def _client_config(request: Request, service: TinkerService) -> Response:
    return JSONResponse(CLIENT_CONFIG)


async def _dynamic_config(request: Request, service: TinkerService) -> Response:
    return JSONResponse({})


async def _telemetry(request: Request, service: TinkerService) -> Response:
    await read_body(request, LIMITS)
    return JSONResponse({"status": "accepted"})  # and dropped


async def _capabilities(request: Request, service: TinkerService) -> Response:
    config = service.config
    names = dict.fromkeys((config.name, str(config.folder)))
    model = {"max_context_length": config.context_tokens, "trainable": True, "sampleable": True}
    return JSONResponse({"supported_models": [{"model_name": name, **model} for name in names]})


async def _create_session(request: Request, service: TinkerService) -> Response:
    await _body(request, request_schema.CreateSession)
    body = {"type": "create_session", "session_id": service.create_session(), "info_message": NO_HEAD}
    return JSONResponse(body)


async def _heartbeat(request: Request, service: TinkerService) -> Response:
    service.hear((await _body(request, request_schema.OfSession)).session_id)
    return JSONResponse({"type": "session_heartbeat"})


async def _finish(request: Request, service: TinkerService) -> Response:
    await read_body(request, LIMITS)
    service.finish(request.path_params["session"])
    return Response(status_code=204)


async def _create_model(request: Request, service: TinkerService) -> Response:
    return _promise(service.create_model(await _body(request, request_schema.CreateModel)))


async def _get_info(request: Request, service: TinkerService) -> Response:
    return JSONResponse(service.info((await _body(request, request_schema.OfModel)).model_id))


async def _forward_backward(request: Request, service: TinkerService) -> Response:
    kind = request.headers.get("content-type", "")
    if kind != PROTOBUF:
        raise RequestError(f"Content-Type = '{kind}' is not {PROTOBUF}; use the SDK 0.25 or newer.", status=415)
    data = await read_body(request, LIMITS)
    return _promise(service.forward_backward(await asyncio.to_thread(read_forward_backward, data), len(data)))


async def _optim_step(request: Request, service: TinkerService) -> Response:
    return _promise(service.optim_step(await _body(request, request_schema.OptimStep)))


async def _save_weights(request: Request, service: TinkerService) -> Response:
    return _promise(service.save_weights(await _body(request, request_schema.SaveWeights)))


async def _save_for_sampler(request: Request, service: TinkerService) -> Response:
    return _promise(service.save_for_sampler(await _body(request, request_schema.SaveForSampler)))


async def _load_weights(request: Request, service: TinkerService) -> Response:
    return _promise(service.load_weights(await _body(request, request_schema.LoadWeights)))


async def _weights_info(request: Request, service: TinkerService) -> Response:
    place = place_of((await _body(request, request_schema.WeightsInfo)).tinker_path)
    _, about = service.store.find(place.path, place.kind)
    return JSONResponse(
        {
            "base_model": about.base,
            "is_lora": True,
            "lora_rank": about.rank,
            "train_unembed": about.train_unembed,
            "train_mlp": about.train_mlp,
            "train_attn": about.train_attn,
        }
    )


async def _create_sampling(request: Request, service: TinkerService) -> Response:
    number = service.create_sampling(await _body(request, request_schema.CreateSampling))
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": number})


async def _get_sampler(request: Request, service: TinkerService) -> Response:
    return JSONResponse(service.sampler(request.path_params["sampler"]))


async def _asample(request: Request, service: TinkerService) -> Response:
    data = await read_body(request, LIMITS)
    number, answers = service.sample(read_model(request_schema.SampleBody, parse(data, LIMITS)), len(data))
    return _promise(number, sample_sequence_ids=answers)


async def _retrieve(request: Request, service: TinkerService) -> Response:
    number = (await _body(request, request_schema.Retrieve)).request_id
    future = service.desk.future(number)
    if future is None:
        raise UnknownError(
            f"request_id = '{number}' is not known; its result was given out long ago, or never promised."
        )
    done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=POLL_S)
    if not done:
        return JSONResponse({"type": "try_again", "request_id": number, "queue_state": "active"}, status_code=408)
    service.desk.note_fetched(number)
    return _outcome(future.result())


def _outcome(outcome: Outcome) -> Response:
    if isinstance(outcome, RequestFailed):
        return JSONResponse({"error": outcome.message, "category": "user" if outcome.is_users else "server"})
    return Response(outcome.body, media_type=PROTOBUF if outcome.is_proto else "application/json")


async def _checkpoints(request: Request, service: TinkerService) -> Response:
    saved = await asyncio.to_thread(lambda: list(service.store.list_saved(request.path_params["model"])))
    return JSONResponse({"checkpoints": saved})


async def _delete_checkpoint(request: Request, service: TinkerService) -> Response:
    service.store.delete(place_of(f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"))
    return Response(status_code=204)


ROUTES: Routes[TinkerService] = (
    ("POST", "/client/config", _client_config),
    ("POST", "/client/dynamic_config", _dynamic_config),
    ("POST", "/telemetry", _telemetry),
    ("GET", "/get_server_capabilities", _capabilities),
    ("POST", "/create_session", _create_session),
    ("POST", "/session_heartbeat", _heartbeat),
    ("POST", "/sessions/{session}/finish", _finish),
    ("POST", "/create_model", _create_model),
    ("POST", "/get_info", _get_info),
    ("POST", "/forward_backward", _forward_backward),
    ("POST", "/optim_step", _optim_step),
    ("POST", "/save_weights", _save_weights),
    ("POST", "/save_weights_for_sampler", _save_for_sampler),
    ("POST", "/load_weights", _load_weights),
    ("POST", "/weights_info", _weights_info),
    ("POST", "/create_sampling_session", _create_sampling),
    ("GET", "/samplers/{sampler}", _get_sampler),
    ("POST", "/asample", _asample),
    ("POST", "/retrieve_future", _retrieve),
    ("GET", "/training_runs/{model}/checkpoints", _checkpoints),
    ("DELETE", "/training_runs/{model}/checkpoints/{checkpoint:path}", _delete_checkpoint),
)
