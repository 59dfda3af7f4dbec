"""Plans and frontiers: what a user holds, reads and saves."""
