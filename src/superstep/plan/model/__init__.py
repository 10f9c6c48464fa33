"""The numbers of a model: a model family's config.json, named sizes, the logical axes of its parameters."""
