"""The spec: the user's request, frozen and validated, with all faults reported at once."""
