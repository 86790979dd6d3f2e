"""Records of a run: versioned rows with units, append-only writers, tolerant readers.

Files are the record; Prometheus and the report are views of them. A `kill -9` at any moment loses
at most the row being written.
"""
