"""The numbers of a model: a model family's config.json, the logical axes of its parameters."""
