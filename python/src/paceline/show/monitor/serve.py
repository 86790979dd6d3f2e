"""`paceline monitor`: serve one run directory with Prometheus, and with Grafana if it is installed.

Prometheus's storage is only a view, built again each time; the files of the run are the record.
All files of the session are in the run directory's folder `monitor`. Rules, dashboards and
provisioning are those of the folder monitoring/.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.base.host.locks import exclusive_lock
from paceline.base.host.processes import end_processes, guarded
from paceline.measure.records.files import write_text
from paceline.measure.records.layout import RunFiles
from paceline.show.export.openmetrics import write_openmetrics

_FILES = Path(__file__).parent / "files"
_LOOK_S = 0.2
_END_S = 10.0
_IMPORT_LIMIT_S = 600.0
_LOG_LINES = 5
# Sidecars are found by the files that they write. `instance` and `job` are dropped from series, so
# that imported series and those of successive sidecars on a host continue each other.
_CONFIGURATION = """\
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 5s}
rule_files: ["rules/*.yml"]
scrape_configs:
  - job_name: paceline
    file_sd_configs: [{files: ["../targets/*.json"], refresh_interval: 5s}]
    metric_relabel_configs: [{action: labeldrop, regex: instance|job}]
"""
# Prometheus deletes blocks that are older than this, relative to the newest block.
_RETENTION = "3650d"
# Where Grafana's packages put what it serves; a tarball has it beside bin/.
_GRAFANA_HOMES = (Path("/usr/share/grafana"), Path("/usr/local/share/grafana"))


def monitor(run: RunFiles, say: Callable[[str], None], *, listen: str, grafana_listen: str) -> None:
    """Serve until a signal ends this process (see `cli.signals`), then end all child processes.

    listen, grafana_listen: HOST:PORT. Raises UsageError for a wrong address or directory,
    EnvironmentLacks if Prometheus is missing or ends by itself, TimedOut.
    """
    if not run.manifest.exists() and not (run.root / "trials").is_dir():
        raise UsageError(
            f"{run.root}: expected a run directory, with manifest.json or trials/; found "
            f"{'neither in it' if run.root.is_dir() else 'no such directory'}"
        )
    _check_address(listen, "--listen")
    _check_address(grafana_listen, "--grafana-listen")
    prometheus, promtool = (_find_program(name) for name in ("prometheus", "promtool"))
    children: list[_Child] = []
    with _own_folder(run):
        _import_traces(run, promtool, say)
        argv = [
            prometheus,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--storage.tsdb.retention.time={_RETENTION}",
            f"--web.listen-address={listen}",
            "--log.level=warn",
        ]
        try:
            children.append(_Child("Prometheus", argv, run.monitor, {}))
            say(f"Prometheus: http://{listen}")
            children += _start_grafana(run, listen, grafana_listen, say)
            say("stop with Ctrl-C")
            while True:
                for child in children:
                    child.check()
                time.sleep(_LOOK_S)
        except (KeyboardInterrupt, SystemExit):
            return
        finally:
            end_processes([child.process for child in children], _END_S)


def _check_address(text: str, option: str) -> None:
    """Raise UsageError unless it is HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"{option} {text!r}: expected HOST:PORT, such as 127.0.0.1:9090")


class _Child:
    """A running program and the file of its output; the kernel ends it if this process dies."""

    def __init__(
        self, name: str, argv: list[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._log = folder / f"{name.lower()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                guarded(argv),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this process
                env={**os.environ, **environment},
            )

    def check(self) -> None:
        """Raise EnvironmentLacks if it has ended."""
        status = self.process.poll()
        if status is None:
            return
        lines = self._log.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        raise EnvironmentLacks(
            f"{self._name} ended by itself with exit status {status}; if its address is in use, "
            f"choose another with --listen or --grafana-listen; its output is in {self._log}:\n"
            + "\n".join(lines)
        )


def _find_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise EnvironmentLacks(
            f"{name}: not found on PATH; it comes with Prometheus (Debian: apt-get install "
            "prometheus; otherwise https://prometheus.io/download/). A live view without it: "
            "paceline watch RUN_DIR"
        )
    return found


@contextmanager
def _own_folder(run: RunFiles) -> Iterator[None]:
    """Lock the monitor folder of the run directory, and replace the files of an earlier session.

    Two monitors cannot share the storage.
    """
    try:
        run.monitor.mkdir(mode=0o700, exist_ok=True)
        run.targets.mkdir(exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(
            f"{run.monitor}: expected a folder that can be written: {error.strerror or error}"
        ) from error
    otherwise = (
        f"{run.root}: another `paceline monitor` is running; end it first, or use the address that "
        "it printed"
    )
    with exclusive_lock(run.monitor / "lock", 0.0, otherwise):
        for name in ("data", "rules", "grafana"):
            shutil.rmtree(run.monitor / name, ignore_errors=True)
        shutil.copytree(_FILES / "rules", run.monitor / "rules")
        write_text(run.monitor / "prometheus.yml", _CONFIGURATION)
        (run.monitor / "data").mkdir()
        yield


def _import_traces(run: RunFiles, promtool: str, say: Callable[[str], None]) -> None:
    """Make blocks of Prometheus's storage from the traces of the run."""
    text = run.monitor / "traces.om"
    try:
        found = write_openmetrics(run, text)
        for trial in found.left_out:
            say(f"left out: {trial}")
        say(f"imports {found.trials} trials, {found.samples} samples")
        if not found.samples:
            return
        argv = [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text)]
        done = subprocess.run(
            guarded([*argv, str(run.monitor / "data")]),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_IMPORT_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimedOut(
            f"promtool did not import {text} within {_IMPORT_LIMIT_S:.0f} s; is the disk slow?"
        ) from error
    finally:
        text.unlink(missing_ok=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EnvironmentLacks(
            f"promtool could not import the traces of {run.root}: "
            f"{lines[-1] if lines else f'exit status {done.returncode}'}; is it the promtool of "
            "this Prometheus?"
        )


def _start_grafana(
    run: RunFiles, prometheus: str, listen: str, say: Callable[[str], None]
) -> list[_Child]:
    """Start Grafana with the dashboards: who reaches the address may look, and nobody may log in.

    https://grafana.com/docs/grafana/latest/setup-grafana/configure-grafana/
    """
    program = shutil.which("grafana") or shutil.which("grafana-server")
    if program is None:
        say("Grafana: not installed; its dashboards are in the package and in monitoring/grafana")
        return []
    home = Path(program).resolve().parents[1]
    for folder in (home, *_GRAFANA_HOMES):
        if (folder / "conf" / "defaults.ini").is_file():
            home = folder
            break
    server = ["server"] if Path(program).name == "grafana" else []
    host, _, port = listen.rpartition(":")
    own = (run.monitor / "grafana").resolve()
    environment = {
        "PACELINE_PROMETHEUS_URL": f"http://{prometheus}",
        "PACELINE_DASHBOARDS": str(_FILES / "dashboards"),
        "GF_PATHS_PROVISIONING": str(_FILES / "provisioning"),
        "GF_PATHS_DATA": str(own / "data"),
        "GF_PATHS_LOGS": str(own / "logs"),
        "GF_PATHS_PLUGINS": str(own / "plugins"),
        "GF_SERVER_HTTP_ADDR": host.strip("[]"),
        "GF_SERVER_HTTP_PORT": port,
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_SECURITY_ADMIN_PASSWORD": secrets.token_urlsafe(24),  # not admin's well-known one
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(_FILES / "dashboards" / "run.json"),
        "GF_LOG_MODE": "console",
    }
    argv = [program, *server, "--homepath", str(home)]
    child = _Child("Grafana", argv, run.monitor, environment)
    say(f"Grafana: http://{listen}/d/paceline-run (after some seconds)")
    return [child]
