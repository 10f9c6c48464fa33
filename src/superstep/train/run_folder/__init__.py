"""The folder of a run: its paths, lock, identity and status, and what is looked at in it after a fault."""
