"""``superstep serve`` and the settings that it shares with other verbs."""
