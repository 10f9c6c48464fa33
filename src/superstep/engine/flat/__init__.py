"""Flat buffers: the layout of parameters, gradients and moments, how they are sharded (ZeRO), and their snapshots."""
