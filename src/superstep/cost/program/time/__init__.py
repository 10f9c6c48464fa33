"""The time of a program: its operations, their prices, and the simulation of its instructions."""
