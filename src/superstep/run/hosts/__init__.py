"""A run on several hosts: its table, its restarts, and another plan when a host is lost."""
