"""``superstep train``: the verb, the display of a run on a terminal, its live report."""
