"""Models that users bring: modules cut into units, and detection of parts that cannot be parallelised."""
