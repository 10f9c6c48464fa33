"""Superstep: a training engine for foundation models."""

__version__ = "0.1.0"
