"""The strict device: an emulated GPU under torch's name ``cuda``, in a build of torch for CPUs.

Code for GPUs runs on it unchanged and computes the CPU's results, asynchronously: kernels and copies wait in streams,
and threads run them in an order drawn from a seed. The host cannot access the device's memory; two uses of the same
bytes that no stream, event or wait orders raise an error in the second call, with both lines. ``load`` comes before
torch is imported. Only the package ``cli`` uses it.
"""
