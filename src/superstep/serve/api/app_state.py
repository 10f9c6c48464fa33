"""AppState: what every handler receives."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.errors import did_you_mean
from superstep.http.drain import Drain
from superstep.http.limits import Queue
from superstep.http.request_error import RequestError, show
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.backend import Backend, Health
from superstep.serve.api.limits import Limits
from superstep.serve.api.metrics import ServeMetrics
from superstep.serve.api.text_protocol import TextProtocol


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The shared state of all handlers.

    Attributes:
        words: the text part.
        limits: of requests.
        queue: places for answers.
        began_s: when the server started, in seconds since 1970; the age of its models.
        admin: None without admin paths.
    """

    backend: Backend
    words: TextProtocol
    limits: Limits
    queue: Queue
    metrics: ServeMetrics
    drain: Drain
    began_s: int
    admin: Admin | None = None

    @property
    def most_prompt_bytes(self) -> int:
        """The longest text that may fit the context, in bytes: as many times its longest token."""
        return self.backend.info.context_tokens * self.words.longest_token_bytes

    def health(self) -> Health:
        """Whether requests are answered now."""
        return Health(is_ready=False, state="draining") if self.drain.is_begun else self.backend.health()

    def adapter_of(self, model: str | None) -> str:
        """The adapter of a client's ``model``; empty for the model itself.

        Raises:
            RequestError: 404 where no model has this name.
        """
        name = self.backend.info.name
        if model is None or model == name:
            return ""
        if model in self.backend.adapters:
            return model
        known = [name, *self.backend.adapters]
        raise RequestError(
            f"model = {show(model)} is not served here{did_you_mean(model, known)}",
            status=404,
            param="model",
            code="model_not_found",
        )
