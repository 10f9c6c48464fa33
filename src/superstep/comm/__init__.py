"""Devices, the mesh of ranks, process groups and collectives. Here torch.distributed is used."""
