"""An iteration of reinforcement learning as a value: compiled, checked, simulated, its memory, its text."""
