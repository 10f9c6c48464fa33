"""Models that users bring: modules cut into units, and what they contain that cannot be parallelised."""
