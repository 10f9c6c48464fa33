"""Triton kernels for GPUs: attention, norms, gates, loss, optimizer."""
