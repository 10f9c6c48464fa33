"""The search for the best layout on a cluster: candidates, their price, calibration, goodput under failures."""
