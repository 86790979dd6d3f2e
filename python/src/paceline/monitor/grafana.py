"""Grafana for one run directory: provisioned with Prometheus and the dashboards, for readers only.

https://grafana.com/docs/grafana/latest/administration/provisioning/, and for the environment
https://grafana.com/docs/grafana/latest/setup-grafana/configure-grafana/.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from paceline.monitor.prometheus import packaged
from paceline.records.files import write_text

if TYPE_CHECKING:
    from paceline.monitor.prometheus import Address

HOME = "paceline-run"  # the uid of the dashboard to begin with
# Where Grafana's packages put what it serves; a tarball has it beside bin/.
_HOMES = (Path("/usr/share/grafana"), Path("/usr/local/share/grafana"))


def find_grafana() -> list[str] | None:
    """Return the command of Grafana's server; None if Grafana is not installed."""
    for name, arguments in (("grafana", ["server"]), ("grafana-server", [])):
        found = shutil.which(name)
        if found is not None:
            return [found, *arguments]
    return None


def write_provisioning(folder: Path, prometheus_url: str) -> None:
    """Write data source and dashboards for Grafana to find under `folder`. Raises OSError."""
    dashboards = folder / "dashboards"
    for name, text in packaged("dashboards").items():
        write_text(dashboards / name, text)
    source = {
        "name": "Prometheus of this run",
        "uid": "paceline-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "editable": False,
        # the scrape interval: what $__rate_interval is counted from
        "jsonData": {"timeInterval": "1s", "httpMethod": "POST"},
    }
    provider = {
        "name": "paceline",
        "folder": "Paceline",
        "type": "file",
        "disableDeletion": True,
        "allowUiUpdates": False,
        "options": {"path": str(dashboards)},
    }
    for kind, content in (("datasources", [source]), ("providers", [provider])):
        place = "datasources" if kind == "datasources" else "dashboards"
        text = yaml.safe_dump({"apiVersion": 1, kind: content}, sort_keys=False)
        write_text(folder / "provisioning" / place / "paceline.yml", text)


def environment(folder: Path, listen: Address) -> dict[str, str]:
    """Settings: anyone who reaches the address may look, nobody may log in or change."""
    return {
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_SERVER_HTTP_ADDR": listen.host,
        "GF_SERVER_HTTP_PORT": str(listen.port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_SECURITY_ADMIN_PASSWORD": secrets.token_urlsafe(24),  # not admin's well-known one
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(folder / "dashboards" / "run.json"),
        "GF_LOG_MODE": "console",
    }


def command(server: list[str]) -> list[str]:
    """Return the command that starts Grafana, with the folder of its own files."""
    return [*server, "--homepath", str(_home_of(Path(server[0])))]


def _home_of(program: Path) -> Path:
    beside = program.resolve().parents[1]
    for home in (beside, *_HOMES):
        if (home / "conf" / "defaults.ini").is_file():
            return home
    return _HOMES[0]
