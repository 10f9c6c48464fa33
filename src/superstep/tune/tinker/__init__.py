"""Tinker over HTTP: a remote client writes the loop; model, gradients and samples are here."""
