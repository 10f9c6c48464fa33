"""Words: what lies between an engine's token ids and the text that people send and read."""
