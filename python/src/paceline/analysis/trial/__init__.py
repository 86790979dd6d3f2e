"""Results of one trial alone, from its files."""
