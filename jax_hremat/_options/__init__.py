"""The ways to run a block, or the body of a loop, that are worth pricing."""
