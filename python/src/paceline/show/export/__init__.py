"""A run as data frames, and as files for other tools.

- `run_data`: the contents of a run directory, each read once, and the formats by name; the base of
  `paceline.Run`;
- `frames`: rows, steps, communication and traces as flat Polars frames.

Each other module writes a format. Libraries beyond Paceline's own dependencies are extras, and are
imported only by the format that needs them.
"""
