"""Constants of the cost model that are fitted to measured steps."""
