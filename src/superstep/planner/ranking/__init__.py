"""Layouts ranked for a request: what is planned for, the first table, its refinement, what failures cost."""
