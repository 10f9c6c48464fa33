"""Diagnosis of a run: what is observed of each rank, which rank waits for which, stragglers, what is wrong."""
