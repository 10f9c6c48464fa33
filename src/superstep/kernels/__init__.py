"""Kernels in C++ and Triton beside what they compute in plain torch; compiled where they run."""
