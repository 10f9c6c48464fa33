"""Reinforcement learning with rollout workers of their own, and the hub between them and the trainer."""
