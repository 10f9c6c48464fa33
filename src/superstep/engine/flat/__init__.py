"""Flat buffers: layout and sharding (ZeRO) of parameters, gradients and moments; their snapshots."""
