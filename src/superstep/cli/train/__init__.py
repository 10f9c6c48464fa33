"""``superstep train``: the run's display, its launch on ranks and hosts, its exit status."""
