"""``superstep view``: the page of a plan's step, and text views of runs and logs."""
