"""The strict device: an emulated GPU under torch's name ``cuda``, in a build of torch for CPUs.

Code for GPUs runs on it unchanged and computes the CPU's numbers, late: kernels and copies wait in streams, and threads
run them in an order that a seed draws. The host cannot touch the device's memory; two uses of the same bytes that no
stream, event or wait orders are an error of the call that makes the second one, with both lines. ``load`` comes before
torch is imported. Of the package ``cli`` alone uses it.
"""
