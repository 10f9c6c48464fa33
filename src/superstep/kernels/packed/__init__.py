"""Weights of 4 or 8 bits in blocks of 64: packed by torch, unpacked by C++, Triton or torch to the same bits."""
