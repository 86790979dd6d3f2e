"""Which variables a program under test is given."""

RUNTIME = "PACELINE_RUNTIME_DIR"  # see conftest.py


def is_kept(variable: str) -> bool:
    """Not what the user set for own runs; but the folder where these tests' sidecars meet."""
    return variable == RUNTIME or not variable.startswith(("PACELINE_", "OMP_"))
