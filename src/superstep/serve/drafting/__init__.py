"""Speculative decoding: drafts from the text or a small model, their forecast; grammars for structured output."""
