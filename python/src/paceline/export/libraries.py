"""Libraries that are extras of Paceline."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import EnvironmentLacks


def require(extra: str, *modules: str) -> None:
    """Raise EnvironmentLacks with the command to install unless all `modules` are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"export to {extra}: expected the packages {', '.join(modules)}, not installed: "
            f"{', '.join(missing)}; install them with `pip install 'paceline[{extra}]'`"
        )
