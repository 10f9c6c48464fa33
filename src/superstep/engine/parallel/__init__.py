"""Tensor, sequence, context (ring attention, Ulysses) and expert parallelism around plain modules."""
