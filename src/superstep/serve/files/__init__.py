"""Weights of a server on disk: reading with a deadline, atomic publishing."""
