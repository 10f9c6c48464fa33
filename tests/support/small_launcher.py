"""The command, whose ranks measure little of the machine before they begin: ``python small_launcher.py train ...``."""

import superstep.cli.before_torch.preload_torch
from superstep.cli.main import entry


def _small(verb, argv):
    """``preload_torch`` as ever; then another rank in the place of the one that launchers know."""
    _begin(verb, argv)
    from measured_little import rank
    from superstep.run import launch_ranks
    from superstep.run.hosts import train_on_hosts

    train_on_hosts.rank = launch_ranks.rank = rank


if __name__ == "__main__":
    _begin, superstep.cli.before_torch.preload_torch.begin = superstep.cli.before_torch.preload_torch.begin, _small
    entry()
