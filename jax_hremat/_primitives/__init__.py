"""What is known of each primitive: its work, whether it fuses."""
