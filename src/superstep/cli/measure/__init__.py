"""``superstep measure``: this machine's rates, and its roofline."""
