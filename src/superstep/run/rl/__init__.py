"""A run of reinforcement learning: how its job is prepared, its ranks are launched, and what each of them does."""
