"""Shapes of models that read more than text, and their Hugging Face files."""
