"""The attention of a layer, and attention within documents."""
