"""The HTTP face of an engine: OpenAI's endpoints, the native ones, limits, metrics and a chat page."""
