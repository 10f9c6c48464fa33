"""Encoders of pictures and sounds, and the decoder that reads their rows at the places of their tokens."""
