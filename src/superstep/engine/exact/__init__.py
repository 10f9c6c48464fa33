"""Exact mode: layers, attention and loss whose bits are the same on every layout."""
