"""Samples of a user's own file: read by number, checked, shuffled; readers of common formats."""
