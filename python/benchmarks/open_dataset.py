"""Seconds in which a data set of many files is opened.

    python open_dataset.py --out open_dataset.json [--files 20000] [--repeats 9]

The files have names as Spark gives them, and no content that could be read: opening a data set uses
the manifest and the sizes of the files. "all": as the first rank of a node opens it, with a look at
every file; "manifest": as the other ranks do. Wall and CPU time, in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from common import median_interval, shown, write_results
from paceline.train.data.dataset import open_dataset
from paceline.train.data.manifest import MANIFEST_NAME, DataFile, DatasetManifest, image_fields

ROWS = 64
CONTENT = bytes(64)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder, options.files)
        wall_s: dict[str, list[float]] = {"all": [], "manifest": []}
        cpu_s: dict[str, list[float]] = {"all": [], "manifest": []}
        for _ in range(options.repeats):
            for name, check_files in (("all", True), ("manifest", False)):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                dataset = open_dataset(folder, check_files=check_files)
                assert len(dataset.row_group_rows) == options.files
                wall_s[name].append(time.perf_counter() - began_s)
                cpu_s[name].append(time.process_time() - began_cpu_s)
    results = {
        name: {"wall_s": median_interval(wall_s[name]), "cpu_s": median_interval(cpu_s[name])}
        for name in wall_s
    }
    for name, found in results.items():
        shown(f"{name}: wall", found["wall_s"], "s")
        shown(f"{name}: CPU", found["cpu_s"], "s")
    if options.out is not None:
        write_results(
            options.out,
            "open_dataset",
            {"files": options.files, "results": results, "wall_s": wall_s, "cpu_s": cpu_s},
        )


def make(folder: Path, files: int) -> None:
    """Write the files of a data set of images, and its manifest."""
    listed = []
    for number in range(files):
        name = f"part-{number:05d}-c000.parquet"
        (folder / name).write_bytes(CONTENT)
        listed.append(
            DataFile(
                path=name,
                row_group_rows=(ROWS,),
                size_bytes=len(CONTENT),
                sha256=f"{number:064x}",
            )
        )
    manifest = DatasetManifest(
        fields=image_fields(2),
        id_field="sample_id",
        samples=ROWS * files,
        files=tuple(listed),
        versions={},
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.as_json(), indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
