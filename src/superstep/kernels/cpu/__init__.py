"""C++ of the CPU kernels: attention, norms, gates, loss, matrix products."""
