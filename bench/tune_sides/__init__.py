"""Who is measured beside ``superstep tune``: each a program that runs with the peer's own Python."""
