"""Grades over HTTP."""
