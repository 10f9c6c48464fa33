"""``superstep scaling``: laws fitted to runs."""
