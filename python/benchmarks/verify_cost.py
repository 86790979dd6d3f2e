"""Time that `paceline verify` needs, relative to the plain run of the same script, interleaved.

    python verify_cost.py --out results/raw/verify_cost.json [--repeats 5] [--steps 16]

examples/scripts/ddp.py with a small and a large network: in one process, on two one-thread ranks
under torchrun, and under `paceline verify` with as many steps. Times are of whole commands, the
start of Python and the imports included. The plain run of a ratio is that of two ranks.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import documented_parser, paired_ratio, shown, write_results
from mpi_job import environment

SCRIPT = Path(__file__).resolve().parents[2] / "examples/scripts/ddp.py"
WIDTHS = (512, 4096)  # 0.3 and 17 million parameters
BATCH = 64
_LIMIT_S = 600.0
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def commands(width: int, steps: int, folder: Path) -> dict[str, list[str]]:
    """Return the command of each way."""
    sizes = ["--width", str(width), "--samples", str(BATCH * steps), "--epochs", "1"]
    script = [str(SCRIPT), *sizes, "--batch", str(BATCH)]
    verify = ["verify", "-q", "--steps", str(steps), "--out", str(folder)]
    return {
        "one process": [*_TORCHRUN, "1", *script],
        "two ranks": [*_TORCHRUN, "2", *script],
        "verify": [sys.executable, "-m", "paceline.cli", *verify, *script],
    }


def seconds(command: list[str]) -> float:
    """Run a command to its end. Raises if it fails or takes too long."""
    began_s = time.monotonic()
    subprocess.run(
        command,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
    )
    return time.monotonic() - began_s


def measured(width: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by repeat, in an order drawn anew for each."""
    order = random.Random(1)  # noqa: S311
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="verify-cost-") as folder:
        for repeat in range(repeats):
            ways = list(commands(width, steps, Path(folder) / str(repeat)).items())
            for name, command in order.sample(ways, len(ways)):
                found.setdefault(name, []).append(seconds(command))
                print(f"{repeat} {name} {width}: {found[name][-1]:.1f} s", file=sys.stderr)
    return found


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    results = []
    for width in WIDTHS:
        raw = measured(width, arguments.steps, arguments.repeats)
        ratio = paired_ratio(raw["verify"], raw["two ranks"])
        shown(f"verify over two plain ranks, width {width}", ratio, "x")
        results.append({"width": width, "steps": arguments.steps, "ratio": ratio, "seconds": raw})
    write_results(arguments.out, "verify_cost", {"networks": results})


if __name__ == "__main__":
    main()
