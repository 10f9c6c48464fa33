"""The HTTP endpoints of an engine: generation, tokenization, admin, health, metrics, the chat page."""
