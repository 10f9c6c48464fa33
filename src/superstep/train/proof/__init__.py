"""The proof of a layout: against one process, within a tolerance or bit by bit, and through a restart."""
