"""superstep tune serve: clients train adapters of a model over HTTP, with Tinker's client."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.tune.tune_serve import TinkerOptions, read
from superstep.cli.printer import Printer
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.comm.device import Device, choose
from superstep.errors import ConfigError
from superstep.http.port import Port, open_port
from superstep.run.serving.served_model import ServedModel, find_model
from superstep.serve.config import usual_config
from superstep.tune.tinker.app import make_app
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.open_service import open_service

KEY = "TINKER_API_KEY"
"""The environment variable of the key. Tinker's clients read it too."""


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    path, options = read(argv)
    with open_port(options.host, options.port, names=options.allowed_hosts, grace_s=options.grace_s) as port:
        return _serve(path, options, port)


def _serve(path: Path, options: TinkerOptions, port: Port) -> int:
    model, key, console = find_model(path, options.name), key_of(options.key, os.environ.get(KEY)), Printer()
    config = tinker_config(model, options)
    console.say(f"Loading {config.folder}.")
    service = open_service(config, Device(choose(options.device, 1)), tell=console.warn)
    exact = ", sampled with the bits of training" if config.exact else ""
    console.say(f"{config.name}: {config.compute}, sequences of {service.config.context_tokens} tokens{exact}.")
    console.say(f"TINKER_BASE_URL={port.url} {KEY}={'tml-any' if key is None else '...'}")
    try:
        return port.serve(make_app(service, key=key, entrance=port.entrance), tell=console.warn)
    finally:
        service.desk.close()


def tinker_config(model: ServedModel, options: TinkerOptions) -> TinkerConfig:
    """Settings of the service; missing options come from its run, if any."""
    run, exact = model.run, options.numerics.exact
    if run is not None and exact is None:
        exact = run.numerics.exact
    context = run.data.sequence_tokens if run is not None and options.context_tokens is None else options.context_tokens
    return TinkerConfig(
        folder=model.folder.resolve(),
        name=model.name,
        root=Path(options.state),
        compute=options.numerics.compute or usual_config(run).compute,
        exact=bool(exact),
        context_tokens=context,
        alpha=options.alpha,
        most_rank=options.most_rank,
        models=options.models,
        adapters=options.adapters,
        batch_tokens=options.batch_tokens,
        kernels=kernels_folder(options.kernels),
    )


def key_of(given: str | None, in_environment: str | None) -> str | None:
    """The key that clients must send; None without one.

    Args:
        given: on the command line: a key, or @FILE with the key.
        in_environment: in the environment.

    Raises:
        ConfigError: Tinker's client would not send it.
    """
    text, where = (in_environment, KEY) if given is None else (given, "--key")
    if text is None:
        return None
    if given is not None and given.startswith("@"):
        try:
            text = Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--key = '{given}' cannot be read ({error}); name a file of one line.") from None
    if not re.fullmatch(r"tml-[!-~]+", text):
        raise ConfigError(f"{where} must be one word that begins with tml-, as Tinker's client has it.")
    return text
