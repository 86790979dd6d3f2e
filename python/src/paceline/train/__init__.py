"""The training itself: written once, unaware of who launched it."""
