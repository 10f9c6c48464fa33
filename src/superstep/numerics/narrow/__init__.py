"""Moments and master weights in fewer bits than fp32: how they are updated, and how they are rounded."""
