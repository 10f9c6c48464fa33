"""Text or a user's samples to batches: tokenizer, token files, packing, shuffling; at any position of a run."""
