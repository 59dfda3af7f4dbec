"""Small things that every stage may use; they know of no stage."""
