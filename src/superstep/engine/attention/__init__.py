"""Which attention a layer computes with, and attention within documents."""
