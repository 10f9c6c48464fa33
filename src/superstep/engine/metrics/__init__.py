"""Figures of a step beside its loss: of tokens, and of a second loss."""
