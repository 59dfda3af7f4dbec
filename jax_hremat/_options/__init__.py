"""The options of a block, or of the body of a loop or branch, that are worth pricing."""
