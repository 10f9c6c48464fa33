"""Pictures in text and SVG: the timeline of a step, lanes, memory, curves."""
