"""Checkpoints in an object store, and their copies there."""
