"""The weights that a run begins with, adapters beside them, and the folders in which they are published."""
