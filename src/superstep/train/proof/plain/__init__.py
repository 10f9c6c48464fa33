"""Plain code that a run's batches are compared with."""
