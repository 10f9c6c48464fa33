"""Tinker's verbs over HTTP: a client somewhere else writes the loop, and the model, its gradients and its answers are
here.
"""
