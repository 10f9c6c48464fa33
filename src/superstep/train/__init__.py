"""The training loop and the session that it drives: batches, learning rate schedule, saving, resuming."""
