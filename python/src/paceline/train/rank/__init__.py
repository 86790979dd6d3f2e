"""Work of one rank, from rendezvous to result."""
