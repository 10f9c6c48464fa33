"""Sizes of published models, by name."""
