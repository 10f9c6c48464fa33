"""Diagnosis of a run: what is observed of each rank, who waits for whom, stragglers, what is wrong."""
