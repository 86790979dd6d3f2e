"""`python -m paceline.runner.launchers.spark.slots MASTER WANTED SECONDS`: print the free slots."""

from __future__ import annotations

import sys

from paceline.base.host.spark import use_python_of_spark


def main() -> None:
    master, wanted, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    use_python_of_spark()
    from paceline.runner.launchers.spark.session import free_slots  # noqa: PLC0415  (imports pyspark)

    found = free_slots(master, wanted, limit_s)
    print("unknown" if found is None else found)


if __name__ == "__main__":
    main()
