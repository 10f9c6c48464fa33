"""Linear layers of a server: fused projections, packed panels, oneDNN, 8 and 4 bits."""
