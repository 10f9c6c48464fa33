"""Reading of flags: the options that verbs share, their help, and new files that a verb writes."""
