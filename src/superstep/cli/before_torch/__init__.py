"""Before torch is imported: check for mistakes, and start the process from which ranks are forked."""
