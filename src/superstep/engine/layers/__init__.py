"""What linears, norms and gates compute in training: gradient accumulation, LoRA, fused layers."""
