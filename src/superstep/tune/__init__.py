"""Post-training: SFT and DPO on conversations, reinforcement learning, Tinker; recipes and their data."""
