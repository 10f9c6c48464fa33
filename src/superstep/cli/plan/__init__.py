"""``superstep plan``: the best layouts of a model on a cluster, or of a server."""
