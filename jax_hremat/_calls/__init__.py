"""Functions that users call, planned."""
