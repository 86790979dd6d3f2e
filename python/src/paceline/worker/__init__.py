"""One rank of a trial from start to end."""
