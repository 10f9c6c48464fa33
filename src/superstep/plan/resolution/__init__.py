"""From a config to a plan: automatic values, and the refusal of what cannot work."""
