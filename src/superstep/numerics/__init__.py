"""Losses and numbers: loss functions, policy losses (PPO, DPO, ...), tolerances, exact sums, random numbers."""
