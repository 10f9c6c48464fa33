"""Collectives between processes of one host in C++, over shared memory."""
