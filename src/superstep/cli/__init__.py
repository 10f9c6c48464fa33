"""The command line: one module a verb. Arguments and the environment are read here, and nowhere else."""
