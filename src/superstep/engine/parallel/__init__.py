"""Tensor, sequence, context (ring attention, Ulysses) and expert parallelism round plain modules."""
