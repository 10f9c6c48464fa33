"""Paths under /admin, for the operator of the server; they exist only with an admin key.

    GET  /admin/weights                      the engine's status
    POST /admin/weights {path, requests}     answer with other weights
    POST /admin/pause?mode=abort|wait|keep   compute nothing, until
    POST /admin/resume
    POST /admin/sleep?weights=drop|keep      release memory, until
    POST /admin/wake {path}
    POST /admin/abort                        abort all requests
    GET  /admin/adapters                     available adapters
    POST /admin/adapters {name, path}        add or replace an adapter
    DELETE /admin/adapters/NAME              remove one; requests under way keep it

Each answers once it is done. The key comes as ``Authorization: Bearer KEY``. Files are read only from some folders: a
path is resolved before it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from superstep.errors import StateError, did_you_mean
from superstep.http.app import KeyScheme, Routes, read_bearer, with_key
from superstep.http.body_validation import StrictBody, read_model
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError, show
from superstep.http.sse import respond
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.app_state import AppState
from superstep.serve.files.reader import BackgroundReader
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import Command, EngineStatus, PauseMode, Requests


class ChangeFields(StrictBody):
    """The body of POST /admin/weights."""

    path: str = Field(min_length=1)
    requests: Requests = "recompute"


class WakeFields(StrictBody):
    """The body of POST /admin/wake."""

    path: str | None = Field(default=None, min_length=1)


class AdapterFields(StrictBody):
    """The body of POST /admin/adapters."""

    name: str = Field(min_length=1, max_length=256)
    path: str = Field(min_length=1)


def wrong_key() -> RequestError:
    return RequestError(
        "authorization is not this server's admin key; send 'Authorization: Bearer KEY'.",
        status=401,
        param="authorization",
        code="wrong_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def admin_routes(key: str) -> Routes[AppState]:
    scheme = KeyScheme(read_bearer, wrong_key)
    return [(method, path, with_key(handler, key, scheme)) for method, path, handler in ADMIN_ROUTES]


def admin_of(service: AppState) -> Admin:
    """The admin settings, which exist where these paths do."""
    assert service.admin is not None
    return service.admin


async def weights(request: Request, service: AppState) -> Response:
    _choices(request, {})
    return _status_response(admin_of(service).engine.standing)


async def change_weights(request: Request, service: AppState) -> Response:
    fields = read_model(ChangeFields, await read_json(request, service.limits))
    path = await look_up(fields.path, admin_of(service))
    return await _do(messages.ChangeWeights(str(path), fields.requests), service)


async def pause(request: Request, service: AppState) -> Response:
    mode = _choices(request, {"mode": get_args(PauseMode)}).get("mode", "keep")
    return await _do(messages.Pause(cast(PauseMode, mode)), service)


async def resume(request: Request, service: AppState) -> Response:
    _choices(request, {})
    return await _do(messages.Resume(), service)


async def sleep(request: Request, service: AppState) -> Response:
    kept = _choices(request, {"weights": ("drop", "keep")}).get("weights") == "keep"
    return await _do(messages.Sleep(keeps_weights=kept), service)


async def wake(request: Request, service: AppState) -> Response:
    body = await read_json(request, service.limits) if request.headers.get("content-type") else {}
    fields = read_model(WakeFields, body)
    path = None if fields.path is None else str(await look_up(fields.path, admin_of(service)))
    return await _do(messages.Wake(path), service)


async def abort(request: Request, service: AppState) -> Response:
    _choices(request, {})
    return respond({"aborted": service.backend.abort()})


async def adapters(request: Request, service: AppState) -> Response:
    _choices(request, {})
    return _adapters_response(admin_of(service).engine.standing)


async def load_adapter(request: Request, service: AppState) -> Response:
    fields = read_model(AdapterFields, await read_json(request, service.limits))
    if fields.name == service.backend.info.name:
        raise RequestError(
            f"name = {show(fields.name)} is the model's own; give the adapter another.",
            param="name",
            code="invalid_value",
        )
    path = await look_up(fields.path, admin_of(service))
    try:
        return _adapters_response(await admin_of(service).engine.do(messages.LoadAdapter(fields.name, str(path))))
    except StateError as error:
        raise RequestError(str(error), param="path", code="invalid_adapter") from None


async def unload_adapter(request: Request, service: AppState) -> Response:
    name = str(request.path_params["name"])
    if name not in service.backend.adapters:
        raise RequestError(
            f"adapter = {show(name)} is not loaded{did_you_mean(name, service.backend.adapters or ('none',))}",
            status=404,
            param="name",
            code="model_not_found",
        )
    return _adapters_response(await admin_of(service).engine.do(messages.UnloadAdapter(name)))


ADMIN_ROUTES: Routes[AppState] = (
    ("GET", "/admin/weights", weights),
    ("POST", "/admin/weights", change_weights),
    ("POST", "/admin/pause", pause),
    ("POST", "/admin/resume", resume),
    ("POST", "/admin/sleep", sleep),
    ("POST", "/admin/wake", wake),
    ("POST", "/admin/abort", abort),
    ("GET", "/admin/adapters", adapters),
    ("POST", "/admin/adapters", load_adapter),
    ("DELETE", "/admin/adapters/{name:path}", unload_adapter),
)


async def look_up(path: str, admin: Admin) -> Path:
    """``allow_path`` in a thread: a mount that does not answer blocks nobody else. Raises RequestError like
    ``allow_path``, and 400 after a timeout.
    """
    try:
        return await BackgroundReader(
            path, lambda progress: allow_path(path, admin.folders), timeout_s=admin.timeout_s
        ).answer()
    except StateError as error:
        raise RequestError(str(error), param="path", code="invalid_value") from None


def allow_path(path: str, folders: Sequence[Path]) -> Path:
    """Where a path leads, if that is within one of the folders; a relative path is searched in each of them.

    Raises:
        RequestError: 403 where it leads elsewhere, 400 where nothing is there.
    """
    if "\0" in path:
        raise RequestError("path holds a NUL; give the path of a folder or file.", param="path", code="invalid_value")
    try:
        leads = [(folder / path).resolve() for folder in folders]
        inside = [one for one in leads if any(one.is_relative_to(folder.resolve()) for folder in folders)]
        there = [one for one in inside if one.exists()]
    except (OSError, RuntimeError):  # too long, or a link that leads to itself
        raise RequestError(f"path = {show(path)} leads nowhere.", param="path", code="invalid_value") from None
    if not inside:
        raise RequestError(
            f"path = {show(path)} lies outside of the folders that this server takes weights from: "
            f"{', '.join(map(str, folders))}; put them there, or start the server with --serve.weights.",
            status=403,
            param="path",
            code="path_not_allowed",
        )
    if not there:
        raise RequestError(f"path = {show(path)} is not there.", param="path", code="invalid_value")
    return there[0]


def _choices(request: Request, known: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """The query's parameters, each one of the known words."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise RequestError(
                f"{name} is not a field that is known here; leave it out.", param=name, code="unknown_field"
            )
        if value not in known[name]:
            raise RequestError(
                f"{name} = {show(value)} must be one of {', '.join(known[name])}.", param=name, code="invalid_value"
            )
    return request.query_params


async def _do(command: Command, service: AppState) -> Response:
    try:
        return _status_response(await admin_of(service).engine.do(command))
    except StateError as error:
        raise RequestError(str(error), param="path", code="invalid_weights") from None


def _adapters_response(standing: EngineStatus) -> Response:
    return respond({"adapters": msgspec.to_builtins(standing.adapters)})


def _status_response(standing: EngineStatus) -> Response:
    return respond(msgspec.to_builtins(standing))
