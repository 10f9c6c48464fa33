"""Snapshots in shared memory, their checksums, and checkpoints that are written from them."""
