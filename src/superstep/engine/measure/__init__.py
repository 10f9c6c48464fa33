"""Measurements of this machine: products, memory, disk, links."""
