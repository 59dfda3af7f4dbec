"""What XLA made of a program: its optimised HLO, read, and what that takes in memory and time."""
