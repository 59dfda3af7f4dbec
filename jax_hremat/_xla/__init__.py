"""Targets, the compiler, and what its executables take."""
