"""``superstep tune``: sft, dpo, rl, merge and serve."""
