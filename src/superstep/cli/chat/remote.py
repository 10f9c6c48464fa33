"""A remote model: OpenAI's endpoint for chats, as a stream."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from superstep.errors import UserError

Message = Mapping[str, str]

WARNING = re.compile(r'299 \S+ "(.*)"')
"""The text of a persistent warning (RFC 7234, 5.5)."""

PATIENCE_S = 600.0
"""Longest silence of a server: other requests may come first."""


class RemoteModel:
    """A chat with a server.

    Args:
        url: of its root, or of its ``/v1``.
        model: its name; None uses the first.
        key: for the server.
        fields: of every request besides the messages.
        note: shows messages to the user, such as the server's warnings.

    Raises:
        UserError: nothing answers there, or it is no such server.
    """

    def __init__(
        self, url: str, *, model: str | None, key: str | None, fields: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        self._url, self._parts = url, urlsplit(url)
        try:
            port = self._parts.port
        except ValueError:
            port = 0
        if not self._parts.hostname or port == 0:
            raise UserError(f"'{url}' is not the URL of a server; write for example http://127.0.0.1:8000.")
        self._path = self._parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"} | (
            {} if key is None else {"authorization": f"Bearer {key}"}
        )
        self._fields = dict(fields)
        self._note = note
        self.name = self._first() if model is None else model

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """The pieces of an answer, as they arrive. Closing it stops the answer.

        Raises:
            UserError: the server refuses, or disconnects.
        """
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._fields}
        with closing(self._connect()) as connection:
            response = self._send_request(connection, "POST", "/v1/chat/completions", json.dumps(body))
            if (warned := WARNING.fullmatch(response.headers.get("Warning", ""))) is not None:
                self._note(warned[1])
            yield from self._pieces(response)

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[str]:
        try:
            for line in response:
                kind, _, data = line.decode("utf-8", errors="replace").strip().partition(":")
                if kind != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise UserError(f"{self._url}: {event['error'].get('message', event['error'])}")
                for choice in event.get("choices", ()):
                    yield choice.get("delta", {}).get("content") or ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(f"{self._url} closed the connection during an answer ({error}); ask again.") from error
        raise UserError(f"{self._url} ended an answer before it was complete; ask again.")

    def _first(self) -> str:
        with closing(self._connect()) as connection:
            response = self._send_request(connection, "GET", "/v1/models", None)
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                raise UserError(
                    f"{self._url} is no server of OpenAI's interface: its /v1/models lists no model; name another URL."
                ) from error

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=PATIENCE_S)

    def _send_request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, None if body is None else body.encode(), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"no server answers at {self._url} ({error}); start a server there: superstep serve MODEL."
            ) from error
        if response.status != 200:
            raise UserError(f"{self._url} says {response.status}: {_reason(response.read())}")
        return response


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", errors="replace").split())[:200] or "nothing more."
