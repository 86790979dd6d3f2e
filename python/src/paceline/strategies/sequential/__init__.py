"""`sequential`: one replica on one thread."""
