"""Reports of a run: its first lines, prediction, samples and the sinks of its metrics."""
