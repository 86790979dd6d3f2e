"""Which variables a program under test is given."""

RUNTIME = "PACELINE_RUNTIME_DIR"  # see conftest.py
# A JVM of a test lives for seconds: with its first compiler alone it takes half the CPU time
# (measured: 16 s and 8 s for an ingest of 24 photos).
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
QUICK_JVM = {
    "SPARK_LAUNCHER_OPTS": _QUICK,
    "SPARK_SUBMIT_OPTS": _QUICK,
    "SPARK_DAEMON_JAVA_OPTS": _QUICK,
}


def is_kept(variable: str) -> bool:
    """Not what the user set for own runs; but the folder where these tests' sidecars meet."""
    return variable == RUNTIME or not variable.startswith(("PACELINE_", "OMP_"))
