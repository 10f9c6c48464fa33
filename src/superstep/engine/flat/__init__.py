"""Flat buffers: how parameters, gradients and moments lie in them and are sharded (ZeRO); their snapshots."""
