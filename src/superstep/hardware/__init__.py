"""Chips, links and clusters: the catalogue of published peaks, cluster files, seconds of collectives."""
