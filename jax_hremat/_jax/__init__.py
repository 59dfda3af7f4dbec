"""JAX: its private parts, and what differs between its versions, in one place."""
