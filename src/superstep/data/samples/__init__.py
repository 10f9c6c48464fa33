"""Samples of a user's own file, read by number; readers of common formats; a run's data, be it samples or text."""
