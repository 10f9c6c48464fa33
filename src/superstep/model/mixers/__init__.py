"""Mixers of a block other than attention."""
