"""HTML pages of one file: the report of a run, a step that plays, runs compared, the live server."""
