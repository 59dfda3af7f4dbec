"""An independent replay of an emitted function's step."""
