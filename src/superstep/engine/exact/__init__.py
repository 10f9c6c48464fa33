"""Exact mode: layers, attention and loss with the same bits on every layout."""
