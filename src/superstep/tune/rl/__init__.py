"""Reinforcement learning from rewards: rollout workers, advantages, weight updates, colocated or disaggregated."""
