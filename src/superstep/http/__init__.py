"""HTTP servers: what they share, whatever they answer."""
