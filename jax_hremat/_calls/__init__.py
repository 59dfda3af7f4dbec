"""Planned functions and methods, as users call them."""
