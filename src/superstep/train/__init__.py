"""The trainer of every run and the loop that drives it: batches, learning rate schedule, saving, resuming."""
