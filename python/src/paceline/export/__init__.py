"""A run as data frames, and as files for other tools.

- `run_data`: the contents of a run directory, each read once; the base of `paceline.Run`;
- `frames`: rows, steps, communication and traces as flat Polars frames;
- `formats`: the formats by name. Each other module writes one of them. Libraries beyond Paceline's
  own dependencies are extras, and are imported only by the format that needs them.
"""
