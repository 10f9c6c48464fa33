"""What every handler is given."""

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
    """The engine, the text part, and what is kept of those who ask.

    Attributes:
        backend: the engine.
        words: the text part.
        limits: of requests.
        queue: the places for answers.
        metrics: what is counted.
        drain: of the server.
        began_s: when the server started, in seconds of the epoch; the age of its models.
        admin: what paths for whoever runs the server need; None where there are none.
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
        """Bytes of a text that cannot be more tokens than the context has room for: as many of its longest token."""
        return self.backend.info.context_tokens * self.words.longest_token_bytes

    def health(self) -> Health:
        """Whether requests are answered now."""
        return Health(is_ready=False, state="draining") if self.drain.is_begun else self.backend.health()

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a client means by ``model``; empty for the model itself.

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
