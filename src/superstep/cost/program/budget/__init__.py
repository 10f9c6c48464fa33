"""A step within a budget of memory: which activations are kept, computed again or moved."""
