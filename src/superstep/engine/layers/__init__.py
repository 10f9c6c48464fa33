"""Linears, norms and gates in training: gradient accumulation, LoRA, fused layers."""
