"""What can be cut and what cannot: parameters, sequences, pipeline stages, divisibility."""
