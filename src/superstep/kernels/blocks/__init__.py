"""Kernels of 8-bit moments: blocks of numbers that share a scale, and updates that read and write them."""
