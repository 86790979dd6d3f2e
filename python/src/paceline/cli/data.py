"""`paceline data`: make, convert and examine data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from paceline.base.host.messages import say
from paceline.cli.console import print_json
from paceline.cli.options import count, json_option, pair, seed
from paceline.cli.progress import data_progress
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.data.dataset import inspect_dataset
from paceline.train.data.ingest import ingest
from paceline.train.data.register import register
from paceline.train.data.synth import synthesise

_PATH = click.Path(path_type=Path)
_PRESETS = sorted(workload.name for workload in WORKLOADS.all() if not workload.own_samples)


@click.group("data")
def command() -> None:
    """Synthesise, ingest, register and inspect data sets."""


@command.command("synth")
@click.argument("out_dir", type=_PATH)
@click.option(
    "--preset", type=click.Choice(_PRESETS), required=True, help="Workload to make images for."
)
@click.option("--images", metavar="N", type=count, help="Default: that of the preset.")
@click.option("--seed", metavar="S", type=seed, default=1, help="Seed of the images.")
def synth_command(out_dir: Path, preset: str, images: int | None, seed: int) -> None:
    """Make images in class folders."""
    with data_progress("images") as progress:
        synthesise(out_dir, preset, images, seed, progress)
    print(out_dir)


@command.command("ingest")
@click.argument("images_dir", type=_PATH)
@click.argument("out_dataset")
@click.option(
    "--on-bad-image",
    type=click.Choice(("fail", "skip")),
    default="fail",
    help="What to do about an image that cannot be read.",
)
@click.option(
    "--seed",
    metavar="S",
    type=seed,
    default=1,
    help="Seed of the order of the samples.",
)
def ingest_command(images_dir: Path, out_dataset: str, on_bad_image: Any, seed: int) -> None:
    """Convert class folders of images to a Petastorm data set.

    OUT_DATASET is a folder or a file:// URL.
    """
    say(f"{images_dir}: converting the images; Spark needs some seconds to start")
    with data_progress("images") as progress:
        manifest = ingest(
            images_dir, out_dataset, on_bad_image=on_bad_image, seed=seed, progress=progress
        )
    for skipped in manifest.skipped:
        say(f"skipped {skipped.path}: {skipped.reason}")
    say(f'{manifest.summary}; use it in a spec with data = "{out_dataset}"')
    print(out_dataset)


@command.command("register")
@click.argument("dataset")
@click.option(
    "--manifest-dir",
    metavar="DIR",
    type=_PATH,
    help="Write the manifest to this folder, because DATASET cannot be written to; DIR is then the "
    "data set to name.",
)
@click.option(
    "--codec",
    "codecs",
    metavar="NAME=CODEC",
    type=pair,
    multiple=True,
    help="Encoding of a column whose bytes do not show it: other_image (also BMP and WebP), image, "
    "array or compressed_array; may be repeated.",
)
def register_command(
    dataset: str, manifest_dir: Path | None, codecs: tuple[tuple[str, str], ...]
) -> None:  # fmt: skip
    """Use Parquet files or a Petastorm data set without a conversion.

    DATASET is a folder or a URL (s3, gs, hdfs).
    """
    with data_progress("files") as progress:
        manifest = register(
            dataset,
            manifest_dir=manifest_dir,
            codecs=dict(codecs),
            progress=progress,
        )
    for name, reason in manifest.ignored.items():
        say(f"column {name} cannot be used: {reason}")
    print(manifest_dir or dataset)


@command.command("inspect")
@click.argument("dataset")
@json_option
def inspect_command(dataset: str, as_json: bool) -> None:
    """Show the contents of a data set.

    DATASET is a folder or a URL.
    """
    facts = inspect_dataset(dataset)
    if as_json:
        print_json(facts)
    else:
        print(
            yaml.safe_dump(
                _known(facts), sort_keys=False, allow_unicode=True, default_flow_style=None
            ),
            end="",
        )


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a data set does not have."""
    found = {
        key: _known(value) if isinstance(value, dict) else value for key, value in facts.items()
    }
    return {key: value for key, value in found.items() if value not in (None, [], (), {})}
