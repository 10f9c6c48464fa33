"""A run's data: token files, samples, or conversations with pictures or sounds, which are read as samples."""
