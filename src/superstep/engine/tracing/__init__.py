"""Modules traced on fake tensors: which operations a unit has, before any rank is launched."""
