"""Samples of a user's own file, read by number, and readers of common formats."""
