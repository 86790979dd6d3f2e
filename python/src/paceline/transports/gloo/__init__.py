"""Transport `gloo`."""
