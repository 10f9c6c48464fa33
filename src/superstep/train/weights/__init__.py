"""Initial weights of a run, base weights of adapters, and folders of published weights."""
