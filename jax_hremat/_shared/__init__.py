"""Small utilities that every stage may use and that depend on no stage."""
