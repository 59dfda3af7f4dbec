"""`Program`, `Region` -> a function."""
