"""Compiling for a target, and what the compiler says."""
