"""Schedules of a graph of operations: what is computed and what is dropped, in which order."""
