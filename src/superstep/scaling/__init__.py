"""Scaling laws: fits of the loss over runs, and the best model size for a budget."""
