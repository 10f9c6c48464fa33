"""What units compute with: microbatches and their fields, values between units, and the shapes of both."""
