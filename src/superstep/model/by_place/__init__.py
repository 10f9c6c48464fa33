"""Layers that depend on the place of their samples in the training: dropout and batch norm."""
