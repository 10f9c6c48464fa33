"""Paths under /admin: for whoever runs the server. They are there only where a key was given.

    GET  /admin/weights                      how the engine stands
    POST /admin/weights {path, requests}     answer with other weights
    POST /admin/pause?mode=abort|wait|keep   compute nothing, until
    POST /admin/resume
    POST /admin/sleep?weights=drop|keep      give memory back, until
    POST /admin/wake {path}
    POST /admin/abort                        take all requests back
    GET  /admin/adapters                     those that can be asked for
    POST /admin/adapters {name, path}        one more, or another of the name
    DELETE /admin/adapters/NAME              one less; requests under way keep it

Each answers once it is done. The key comes as ``Authorization: Bearer KEY``. Files are taken from some folders alone: a
path is followed to where it leads before it is looked at.
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
from superstep.http.body_validation import Strict, read_model
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError, show
from superstep.http.sse import respond
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.app_state import AppState
from superstep.serve.files.reader import BackgroundReader
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import Deed, EngineStatus, PauseMode, Requests


class ChangeFields(Strict):
    """What POST /admin/weights takes."""

    path: str = Field(min_length=1)
    requests: Requests = "recompute"


class WakeFields(Strict):
    """What POST /admin/wake takes."""

    path: str | None = Field(default=None, min_length=1)


class AdapterFields(Strict):
    """What POST /admin/adapters takes."""

    name: str = Field(min_length=1, max_length=256)
    path: str = Field(min_length=1)


def wrong_key() -> RequestError:
    """The client does not know the key."""
    return RequestError(
        "authorization is not this server's admin key; send 'Authorization: Bearer KEY'.",
        status=401,
        param="authorization",
        code="wrong_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def admin_routes(key: str) -> Routes[AppState]:
    """The paths, for clients that know the key."""
    scheme = KeyScheme(read_bearer, wrong_key)
    return [(method, path, with_key(handler, key, scheme)) for method, path, handler in ADMIN_ROUTES]


def admin_of(service: AppState) -> Admin:
    """What the paths need; they are there only where it is."""
    assert service.admin is not None
    return service.admin


async def weights(request: Request, service: AppState) -> Response:
    """How the engine stands."""
    _choices(request, {})
    return _status_response(admin_of(service).engine.standing)


async def change_weights(request: Request, service: AppState) -> Response:
    """Other weights, between two steps."""
    fields = read_model(ChangeFields, await read_json(request, service.limits))
    path = await look_up(fields.path, admin_of(service))
    return await _do(messages.ChangeWeights(str(path), fields.requests), service)


async def pause(request: Request, service: AppState) -> Response:
    """Nothing is computed until ``resume``."""
    mode = _choices(request, {"mode": get_args(PauseMode)}).get("mode", "keep")
    return await _do(messages.Pause(cast(PauseMode, mode)), service)


async def resume(request: Request, service: AppState) -> Response:
    """The end of a pause."""
    _choices(request, {})
    return await _do(messages.Resume(), service)


async def sleep(request: Request, service: AppState) -> Response:
    """Memory is given back until ``wake``."""
    kept = _choices(request, {"weights": ("drop", "keep")}).get("weights") == "keep"
    return await _do(messages.Sleep(keeps_weights=kept), service)


async def wake(request: Request, service: AppState) -> Response:
    """The end of sleep, with other weights where a path is given."""
    body = await read_json(request, service.limits) if request.headers.get("content-type") else {}
    fields = read_model(WakeFields, body)
    path = None if fields.path is None else str(await look_up(fields.path, admin_of(service)))
    return await _do(messages.Wake(path), service)


async def abort(request: Request, service: AppState) -> Response:
    """All requests are taken back."""
    _choices(request, {})
    return respond({"aborted": service.backend.abort()})


async def adapters(request: Request, service: AppState) -> Response:
    """Those that can be asked for."""
    _choices(request, {})
    return _adapters_response(admin_of(service).engine.standing)


async def load_adapter(request: Request, service: AppState) -> Response:
    """One more, between two steps."""
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
    """One less, between two steps."""
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
    """As ``allow_path``, while the event loop goes on: a mount that does not answer keeps nobody else.

    Raises:
        RequestError: as there; 400 where no answer came in time.
    """
    try:
        return await BackgroundReader(
            path, lambda progress: allow_path(path, admin.folders), timeout_s=admin.timeout_s
        ).answer()
    except StateError as error:
        raise RequestError(str(error), param="path", code="invalid_value") from None


def allow_path(path: str, folders: Sequence[Path]) -> Path:
    """Where a path leads, if that is within one of the folders; one that is not absolute, from the first that has it.

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
    """What the query says, each of it one of some words."""
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


async def _do(command: Deed, service: AppState) -> Response:
    try:
        return _status_response(await admin_of(service).engine.do(command))
    except StateError as error:
        raise RequestError(str(error), param="path", code="invalid_weights") from None


def _adapters_response(standing: EngineStatus) -> Response:
    return respond({"adapters": msgspec.to_builtins(standing.adapters)})


def _status_response(standing: EngineStatus) -> Response:
    return respond(msgspec.to_builtins(standing))
