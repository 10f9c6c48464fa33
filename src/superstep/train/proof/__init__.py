"""The proof of a layout: a run beside one process, tensor by tensor or bit by bit, and through a restart."""
