"""Attention in torch: a block of queries at a time, with bits that no layout changes, and with sinks."""
