"""Before torch is imported: mistakes are refused, and the process is begun that ranks are forked from."""
