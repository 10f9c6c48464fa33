"""A run of reinforcement learning: preparation of its job, launch of its ranks, and their work."""
