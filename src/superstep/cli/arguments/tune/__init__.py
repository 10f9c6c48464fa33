"""The arguments of ``superstep tune`` and of its verbs."""
