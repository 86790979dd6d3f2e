"""`none`: a single rank needs no transport."""
