"""A model's server: the model that a path names, checked, and its engine behind an application."""
