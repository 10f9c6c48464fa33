"""The command line: one module a verb. Only this part reads arguments and the environment."""
