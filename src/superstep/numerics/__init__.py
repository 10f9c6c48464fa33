"""Losses and numbers: loss functions, policy losses (PPO, DPO, ...), tolerances, exact sums, random numbers.

``update_rules.py`` has the update of each optimizer.
"""
