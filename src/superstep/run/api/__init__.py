"""The functions of ``import superstep``."""
