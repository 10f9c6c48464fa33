"""``superstep measure``: what this machine can do, and its roofline."""
