"""The servers that are measured, each a program that may run in a Python environment of its own."""
