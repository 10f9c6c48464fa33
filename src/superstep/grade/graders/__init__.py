"""Graders: text, numbers, formulas, JSON schemas, code with tests, a model as judge."""
