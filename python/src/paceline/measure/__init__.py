"""Records of a run: rows, files and the sidecar.

1. a rank appends rows (`records.rows`) to its files, between two steps;
2. the sidecar (`telemetry.sidecar`) samples host and processes, and serves Prometheus if asked;
3. `records.metrics` declares each metric once: column, unit, series, help;
4. `records.compact` turns the files of a finished trial into Parquet;
5. `records.tables` reads both forms back for `analysis`.

Read first: `telemetry.sampler.Sampler.tick`.
"""
