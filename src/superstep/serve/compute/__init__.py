"""A step of inference in torch: paged attention, the sampler, quantization, LoRA, tensor-parallel ranks."""
