"""A process that paints a share of the photos: FOLDER PRESET SEED FIRST END STEP.

Writes the number of each finished photo to standard output, a line each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.data.synth import paint_share


def main() -> None:
    """Paint photos FIRST, FIRST + STEP, ... below END."""
    folder, preset, *numbers = sys.argv[1:]
    seed, first, end, step = map(int, numbers)
    for index in paint_share(Path(folder), preset, seed, range(first, end, step)):
        print(index, flush=True)


if __name__ == "__main__":
    main()
