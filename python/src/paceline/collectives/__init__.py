"""How ranks exchange tensors. This package imports nothing else of Paceline."""
