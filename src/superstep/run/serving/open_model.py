"""OpenModel: an engine that answers, behind the application of its HTTP interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from superstep.comm.device import choose
from superstep.errors import ConfigError
from superstep.http.guard import Entrance
from superstep.plan.config import DeviceKind
from superstep.run.console import Console
from superstep.run.serving.served_model import ServedModel, check_model
from superstep.serve.api.admin_backend import Admin, SteeredEngine
from superstep.serve.app import make_app
from superstep.serve.config import ServeConfig
from superstep.serve.processes.load_balancer import replicas_of
from superstep.serve.scheduling.request import ModelInfo
from superstep.serve.text_backend import forms_of, load_words


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A ready model.

    Attributes:
        info: of the model.
        app: its application.
        check: raises the engine's failure, once its ranks cannot be restarted.
    """

    info: ModelInfo
    app: Starlette
    check: Callable[[], None]


@contextmanager
def open_model(
    model: ServedModel,
    serve: ServeConfig,
    *,
    entrance: Entrance,
    device: DeviceKind | None,
    admin_key: str | None,
    weights: Sequence[Path],
    console: Console,
) -> Iterator[OpenModel]:
    """Load a model on ranks of its own within the block; they end with it.

    Args:
        entrance: the checks before the application.
        device: of the ranks; None uses GPUs if there are any.
        admin_key: of the paths under /admin; None serves none of them.
        weights: folders from which new weights may be read, besides the model's own.
        console: shows the loading, and lost ranks.

    Raises:
        UserError: the model cannot be served with these settings, is damaged, or has no tokenizer.
        Fault: a rank failed while it loaded.
    """
    shape = check_model(model, serve).shape
    if admin_key is not None:
        check_key(admin_key, "serve.admin_key")
    words = load_words(model.folder, shape.vocab)
    engine = replicas_of(
        model.folder,
        serve,
        device=choose(device, serve.tp * serve.dp),
        name=model.name,
        forms=forms_of,
        tell=console.warn,
    )
    replicas = f", {serve.dp} replicas" if serve.dp > 1 else ""
    console.say(f"Loading {model.folder} on {serve.tp} {'rank' if serve.tp == 1 else 'ranks'}{replicas}.")

    def check() -> None:
        if (failure := engine.failure) is not None:
            raise failure

    try:
        info = engine.open()
        exact = ", with the bits of training" if serve.exact else ""
        console.say(
            f"{info.name}: {serve.compute}, contexts of {info.context_tokens} tokens{exact}, weights {info.version}."
        )
        admin = None if admin_key is None else _admin(model, serve, engine, admin_key, weights)
        yield OpenModel(info=info, app=make_app(engine, words, admin=admin, entrance=entrance), check=check)
    finally:
        engine.close()


def check_key(key: str, where: str) -> None:
    """Check that a header can carry a key.

    Args:
        where: the key's source, for the error.

    Raises:
        ConfigError: it cannot.
    """
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{where} must be one word of printable ASCII characters, as a header carries it.")


def _admin(model: ServedModel, serve: ServeConfig, engine: SteeredEngine, key: str, weights: Sequence[Path]) -> Admin:
    """Settings of the paths under /admin; adapters may also be read from the folders beside the initial ones."""
    folders = (model.root, *weights, *(folder.parent for _, folder in serve.adapters))
    return Admin(
        key=key, folders=[folder.resolve() for folder in folders], engine=engine, timeout_s=serve.read_timeout_s
    )
