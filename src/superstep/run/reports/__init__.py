"""What a run says of itself: its first lines, prediction, samples and the sinks of its metrics."""
