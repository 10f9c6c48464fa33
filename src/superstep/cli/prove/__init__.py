"""``superstep prove``: a layout against one process, injected faults, emulated GPUs."""
