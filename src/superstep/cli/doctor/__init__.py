"""``superstep doctor``: why a run hangs or is slow."""
