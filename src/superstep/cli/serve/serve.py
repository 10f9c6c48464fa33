"""superstep serve: serves a trained model over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.serve import read
from superstep.cli.printer import Printer
from superstep.cli.serve.serve_settings import serve_config
from superstep.errors import ConfigError
from superstep.http.port import open_port
from superstep.run.serving.open_model import check_key, open_model
from superstep.run.serving.served_model import find_model

KEY = "SUPERSTEP_ADMIN_KEY"
"""The environment variable of the admin key."""


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    path, options = read(argv)
    console = Printer()
    with open_port(options.host, options.port, names=options.allowed_hosts, grace_s=options.grace_s) as port:
        model = find_model(path, options.name)
        opened = open_model(
            model,
            serve_config(model.run, options),
            entrance=port.entrance,
            device=options.plan.device,
            admin_key=admin_key(options.serve.admin_key, os.environ.get(KEY)),
            weights=[Path(folder) for folder in options.serve.weights],
            console=console,
        )
        with opened as server:
            console.say(f"Answering at {port.url} (chat in a browser), {port.url}/v1 (OpenAI's clients).")
            return port.serve(server.app, tell=console.warn, check=server.check)


def admin_key(given: str | None, in_environment: str | None) -> str | None:
    """The key of the paths under /admin.

    Args:
        given: on the command line: a key, or @FILE with the key.
        in_environment: in the environment.

    Raises:
        ConfigError: a header cannot carry it.
    """
    key = in_environment if given is None else given
    if key is None:
        return None
    if given is not None and given.startswith("@"):
        try:
            key = Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"serve.admin_key = '{given}' cannot be read ({error}); name a file of one line."
            ) from None
    check_key(key, KEY if given is None else "serve.admin_key")
    return key
