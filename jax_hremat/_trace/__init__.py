"""A call -> `Program` -> `Graph`."""
