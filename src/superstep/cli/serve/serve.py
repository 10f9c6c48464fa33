"""superstep serve: a trained model answers over HTTP."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.serve import ServerOptions, read
from superstep.cli.port import Port, open_port
from superstep.cli.resolve_model import ServedModel, find_model
from superstep.cli.serve.serve_settings import serve_config
from superstep.comm.device import choose
from superstep.errors import ConfigError
from superstep.serve.api.admin_backend import Admin
from superstep.serve.app import make_app
from superstep.serve.config import plan_of
from superstep.serve.processes.engine_client import EngineClient
from superstep.serve.processes.load_balancer import LoadBalancer, replicas_of
from superstep.serve.scheduling.lora_registry import check_names, folders_of
from superstep.serve.text_backend import forms_of, load_words

KEY = "SUPERSTEP_ADMIN_KEY"
"""The variable that the admin key is taken from, where the command line names none."""


def main(argv: Sequence[str]) -> int:
    """Answer until Ctrl-C or SIGTERM."""
    path, options = read(argv)
    with open_port(options) as port:
        return _serve(path, options, port)


def _serve(path: Path, options: ServerOptions, port: Port) -> int:
    model = find_model(path)
    config = serve_config(model.run, options)
    shape = plan_of(model.folder, config).shape
    check_names(options.name or model.name, [name for name, _ in config.adapters])
    words = load_words(model.folder, shape.vocab)
    key = admin_key(options.serve.admin_key, os.environ.get(KEY))
    host = replicas_of(
        model.folder,
        config,
        device=choose(options.plan.device, config.tp * config.dp),
        name=options.name or model.name,
        forms=forms_of,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    replicas = f", {config.dp} replicas" if config.dp > 1 else ""
    _say(f"Loading {model.folder} on {config.tp} {'rank' if config.tp == 1 else 'ranks'}{replicas}.")
    try:
        info = host.open()
        exact = ", with the bits of training" if config.exact else ""
        _say(f"{info.name}: {config.compute}, contexts of {info.context_tokens} tokens{exact}, weights {info.version}.")
        _say(f"Answering at {port.url} (chat in a browser), {port.url}/v1 (OpenAI's clients).")
        return port.serve(make_app(host, words, admin=_admin(model, options, host, key), entrance=port.entrance))
    finally:
        host.close()


def _admin(
    model: ServedModel, options: ServerOptions, host: EngineClient | LoadBalancer, key: str | None
) -> Admin | None:
    """What the paths under /admin need; None without a key."""
    if key is None:
        return None
    beside = (folder.parent for _, folder in folders_of(options.serve.adapters or ""))
    folders = (model.root, *(Path(folder) for folder in options.serve.weights), *beside)
    return Admin(
        key=key,
        folders=[folder.resolve() for folder in folders],
        engine=host,
        timeout_s=options.serve.read_timeout_s,
    )


def admin_key(given: str | None, in_environment: str | None) -> str | None:
    """The key of the paths under /admin.

    Args:
        given: on the command line: a key, or @FILE that holds it.
        in_environment: in the environment.

    Raises:
        ConfigError: it is none that a header can carry.
    """
    key = in_environment if given is None else given
    if key is None:
        return None
    where = KEY if given is None else "serve.admin_key"
    if given is not None and given.startswith("@"):
        try:
            key = Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"serve.admin_key = '{given}' cannot be read ({error}); name a file of one line."
            ) from None
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{where} must be one word of printable ASCII characters, as a header carries it.")
    return key


def _say(text: str) -> None:
    print(text, flush=True)
