"""Closed forms for many plans at once: arrays in, seconds and bytes out, on published hardware."""
