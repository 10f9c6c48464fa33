"""One compiled call for each step: the fast decoder, the exact one, LoRA in both."""
