"""What a block in a mode costs, and the certificate of a whole step."""
