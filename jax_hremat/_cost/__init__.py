"""What a compiled program costs: its text, its time and its memory."""
