"""Weights of a server on disk: reading them within a deadline, publishing them whole."""
