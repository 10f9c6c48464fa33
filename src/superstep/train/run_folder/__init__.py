"""The folder of a run: its paths, lock, identity and status, and how it is inspected after a fault."""
