"""Activations that are kept for the backward pass: what kernels keep, and where it lies between the passes."""
