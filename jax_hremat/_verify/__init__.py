"""An independent replay of what an emitted function does."""
