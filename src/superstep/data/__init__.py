"""Text, or samples of a user's file, to batches: tokenizer, token files, packing, shuffling; at any position of a run."""
