"""Processes of ranks: the fork server, torchrun, the rendezvous, signals, and how a lost rank is noticed."""
