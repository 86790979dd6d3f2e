"""A folder for PYTHONPATH, from which Python imports `sitecustomize` at its start."""
