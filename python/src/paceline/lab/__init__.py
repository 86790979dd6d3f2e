"""A cluster on one machine: hosts made of network namespaces, with links of their own."""
