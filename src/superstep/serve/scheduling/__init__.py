"""The scheduler of requests and the pages of the KV cache: which request computes what in a step, preemption."""
