"""Checks of a verb before torch is imported, which takes seconds.

With torch a verb checks again, including what needs torch: GPUs, memory, a user's own model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from superstep.cli.arguments import prove, serve, train
from superstep.cli.flags.options import settle
from superstep.cli.launcher import launcher
from superstep.cli.serve.serve_settings import serve_config
from superstep.cli.train.live_report import require_token
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.model.multimodal.families import has_own_units, read_multimodal
from superstep.plan.resolution.check_ranges import check_ranges
from superstep.plan.resolution.resolve import resolve
from superstep.run.launch_rules import SEVERAL_HOSTS, check_launch, check_web
from superstep.run.serving.served_model import check_model, find_model
from superstep.train.run_folder import run_directory


def check_train(arguments: train.TrainArgs) -> None:
    """Check a training run.

    Raises:
        UserError: it cannot run.
    """
    config, hosts = arguments.config, arguments.hosts
    if hosts is not None:
        check_web(arguments.web_port, SEVERAL_HOSTS)
    if arguments.web_port is not None:
        require_token()
    check_launch(config, 1 if hosts is None else hosts.count, launcher())
    if has_own_units(config.model):
        _check_own(config)
    elif hosts is None:
        run_directory.choose(arguments.resolved(resolve))
    else:
        arguments.resolved(resolve)


def check_prove(options: prove.ProveOptions, yields_to: tuple[str, ...] | None) -> None:
    """Check a layout to prove; raises as ``check_train``."""
    plan = options.plan
    if has_own_units(options.model):
        _check_own(options)
    else:
        if options.exact or options.serve or options.faults:
            options = replace(options, numerics=replace(options.numerics, exact=True))
        run = resolve(options) if yields_to is None else settle(options, yields_to, resolve)
        plan = run.config.plan
    if options.device is not None:
        prove.require_gpus(options, plan)


def check_serve(path: Path, options: serve.ServerOptions) -> None:
    """Check a model to serve; raises as ``check_train``."""
    model = find_model(path, options.name)
    check_model(model, serve_config(model.run, options))


def _check_own(config: RunConfig) -> None:
    """Check the settings of a user's own model that do not depend on its units, which are known only once its file has
    run.
    """
    check_ranges(config)
    source = Path(config.model.source or "")
    if read_multimodal(config) is None and not source.is_file():
        raise ConfigError(f"model.source = '{source}' is not a Python file; name one, such as my_model.py.")
    data = config.data.source
    if data is not None and not Path(data).is_file() and not (Path(data) / "corpus.json").is_file():
        raise ConfigError(
            f"data.source = '{data}' is not a Python file; name one, such as my_data.py, or a folder of conversations "
            "that superstep tune sft prepared."
        )
