"""From text to token files: reading, checking, and one process at a time."""
