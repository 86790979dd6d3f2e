"""From spec to trials: who runs where, in which order, on which samples. Arithmetic only."""
