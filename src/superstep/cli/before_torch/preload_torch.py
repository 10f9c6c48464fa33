"""Before a verb imports torch: check its arguments, and start the process from which its ranks are forked."""

from __future__ import annotations

import os
from collections.abc import Sequence

from superstep.cli.arguments import prove, serve, train
from superstep.cli.arguments.tune import tune
from superstep.cli.before_torch.refusals import check_prove, check_serve, check_train
from superstep.cli.before_torch.tune_refusals import check_apart, check_rewards, check_tune
from superstep.cli.flags.options import asks_for_hosts, ranks_of
from superstep.launch import fork_server
from superstep.plan.config import PlanConfig
from superstep.strict.load import load
from superstep.strict.settings import Settings


def begin(verb: str, argv: Sequence[str]) -> None:
    """Check the arguments, and start the fork server if the verb launches ranks. It imports torch while this process
    does.

    Under torchrun nothing is checked here: there only rank 0 shows errors, once.

    Raises:
        UserError: the arguments are invalid.
    """
    is_of_torchrun = "RANK" in os.environ and not asks_for_hosts(argv)
    if verb == "train" and not is_of_torchrun:
        arguments = train.read(argv)
        check_train(arguments)
        if arguments.hosts is not None or ranks_of(arguments.config.plan) > 1:
            fork_server.begin("superstep.cli.train.train")
    elif verb == "tune" and argv and argv[0] in tune.APART:
        check_apart(argv[0], argv[1:])
    elif verb == "tune" and not is_of_torchrun:
        if ranks_of(_check_recipe(argv)) > 1 or asks_for_hosts(argv):
            fork_server.begin("superstep.cli.tune.tune")
    elif verb == "prove":
        options, yields_to = prove.read(argv)
        check_prove(options, yields_to)
        if options.device is not None:
            count, device_bytes = prove.parse_emulated_gpus(options)
            load(Settings(devices=count, device_bytes=device_bytes, raises=False))
            fork_server.begin("superstep.cli.prove.prove", is_unused=True)
        elif (options.world or ranks_of(options.plan)) > 1:
            fork_server.begin("superstep.cli.prove.prove")
    elif verb == "serve":
        check_serve(*serve.read(argv))
        fork_server.begin("superstep.serve.processes.worker")


def _check_recipe(argv: Sequence[str]) -> PlanConfig:
    """The layout of a recipe, after its checks."""
    if argv[:1] == [tune.REWARDS]:
        args = tune.read_rewards(argv[1:])
        check_rewards(args.recipe, args.hosts)
        return args.recipe.plan
    kind, config = tune.read_kind(argv)
    check_tune(kind, config)
    return config.plan
