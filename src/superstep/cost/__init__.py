"""Seconds and bytes of a step before it runs: FLOPs, traffic, memory of each rank, the simulator."""
