"""Kernels in Triton on the emulated GPU: their launch, what they store to, and those that torch replaces."""
