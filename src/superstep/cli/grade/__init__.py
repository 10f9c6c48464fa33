"""``superstep grade``: graders tried, attacked and served."""
