"""``superstep.serve``: what ``superstep serve`` does, beside the program that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from superstep.http.port import open_port
from superstep.http.server import LOOPBACK
from superstep.http.server_thread import ServerThread, serving
from superstep.launch.stop_request import GRACE_S
from superstep.plan.config import DeviceKind
from superstep.run.console import SILENT, Console
from superstep.run.serving.open_model import open_model
from superstep.run.serving.served_model import find_model, guesser_folder
from superstep.serve.config import ServeConfig, usual_config
from superstep.serve.scheduling.request import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where a model answers, and to whom.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        allowed_hosts: names that a request's Host header may have beside loopback's.
        grace_s: seconds for requests under way once the server is stopped.
        name: that clients call the model by; None takes the folder's.
        admin_key: of the paths under /admin; None serves none of them.
        weights: folders that new weights may be read from, beside the model's own.
    """

    host: str = LOOPBACK
    port: int = 0
    allowed_hosts: Sequence[str] = ()
    grace_s: float = GRACE_S
    name: str | None = None
    admin_key: str | None = None
    weights: Sequence[Path] = ()


USUAL = HttpConfig()


class ModelServer:
    """A model that answers over HTTP until ``stop``, or the end of a ``with`` block.

    Attributes:
        url: of its root; OpenAI's clients take ``url + "/v1"``.
        info: of the model: its name, its vocabulary, the tokens of a context, the version of its weights.
    """

    def __init__(self, url: str, info: ModelInfo, thread: ServerThread, opened: ExitStack) -> None:
        self.url, self.info = url, info
        self._thread, self._opened, self._stopping = thread, opened, Lock()

    def wait(self) -> None:
        """Wait until the server is stopped, by another thread or by Ctrl-C here.

        Raises:
            UserError: the engine was lost and cannot be started again; the server has ended.
        """
        self._thread.wait()

    def stop(self) -> None:
        """Refuse new requests, give those under way their grace, and end the engine. It may be called again. Raises as
        ``wait``.
        """
        with self._stopping:
            self._opened.close()
        self._thread.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    model: Path | str,
    config: ServeConfig | None = None,
    *,
    http: HttpConfig = USUAL,
    device: DeviceKind | None = None,
    console: Console = SILENT,
) -> ModelServer:
    """Answer over HTTP, as ``superstep serve`` does; returns once the model is loaded.

    Args:
        model: a run, a checkpoint or a Hugging Face folder.
        config: how it is served; None serves it as it was trained, see ``usual_config``.
        http: where it answers, and to whom.
        device: where it computes; None takes GPUs where there are any.
        console: shows what is loaded, and ranks that are lost; by default nothing is shown.
    """
    with ExitStack() as opened:
        port = opened.enter_context(open_port(http.host, http.port, names=http.allowed_hosts, grace_s=http.grace_s))
        served = find_model(Path(model), http.name)
        settings = usual_config(served.run) if config is None else config
        server = opened.enter_context(
            open_model(
                served,
                replace(settings, speculate=guesser_folder(settings.speculate)),
                entrance=port.entrance,
                device=device,
                admin_key=http.admin_key,
                weights=http.weights,
                console=console,
            )
        )
        thread = opened.enter_context(serving(server.app, port, check=server.check))
        return ModelServer(port.url, server.info, thread, opened.pop_all())
