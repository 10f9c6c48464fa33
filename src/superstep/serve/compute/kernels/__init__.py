"""C++ of the compiled decoder: products of few rows, quantized weights, attention over KV pages."""
