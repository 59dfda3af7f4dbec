"""Targets, the compiler, and the memory and time that its executables take."""
