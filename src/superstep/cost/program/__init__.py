"""The prediction for one plan: its operations, its program on a clock, memory after each instruction."""
