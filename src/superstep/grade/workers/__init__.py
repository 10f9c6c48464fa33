"""Graders in processes of their own: the pool, and the worker that asks a grader."""
