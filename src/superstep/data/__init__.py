"""Text to tokens to batches: the tokenizer, token files, packing, shuffling; batches at any position of a run."""
