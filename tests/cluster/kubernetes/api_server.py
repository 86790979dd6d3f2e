"""A real API server of Kubernetes with the operators' own types, built from Go's registry.

No other part of a cluster runs. Objects are checked as `kubectl apply` has them checked; no pod
starts. The folder gets the programs, their logs, keys and the server's data.
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.support.commands import start_command
from tests.support.listeners import free_address

from paceline.base.host.processes import end_processes
from paceline.collectives.host import wait_until

NAMESPACE = "training"
_PROGRAMS = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
}
# The operators' types: the module that has them, and the file in it.
_TYPES = {
    "github.com/kubeflow/mpi-operator@v0.6.0": "manifests/base/kubeflow.org_mpijobs.yaml",
    "github.com/kubeflow/spark-operator/v2@v2.3.0": (
        "config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml"
    ),
}
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "Pod": f"/api/v1/namespaces/{NAMESPACE}/pods",
    "Job": f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
    "MPIJob": f"/apis/kubeflow.org/v2beta1/namespaces/{NAMESPACE}/mpijobs",
    "SparkApplication": (
        f"/apis/sparkoperator.k8s.io/v1beta2/namespaces/{NAMESPACE}/sparkapplications"
    ),
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
_TOKEN = "token-of-the-test"
_BUILD_S, _START_S, _END_S, _CALL_S = 3600.0, 120.0, 10.0, 20.0


class Refused(Exception):  # noqa: N818  (it reads as the server's answer)
    """The server does not accept an object; the message is its reason."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A server that listens on loopback."""

    address: str  # HOST:PORT
    certificate: Path

    def create(self, document: dict[str, Any], *, try_only: bool = False) -> None:
        """Create an object, or only ask whether it would be accepted. Raises Refused."""
        query = "?fieldValidation=Strict" + ("&dryRun=All" if try_only else "")
        self._call(_PATHS[document["kind"]] + query, document)

    def serves(self, path: str) -> bool:
        """Return whether the server answers this path."""
        try:
            self._call(path)
        except (OSError, Refused):
            return False
        return True

    def _call(self, path: str, document: dict[str, Any] | None = None) -> None:
        request = urllib.request.Request(
            f"https://{self.address}{path}",
            data=None if document is None else json.dumps(document).encode(),
            headers={"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"},
        )
        trusted = ssl.create_default_context(cafile=self.certificate)
        try:
            urllib.request.urlopen(request, timeout=_CALL_S, context=trusted).close()
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode()) from error


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Build and start a server with the operators' types and a namespace for restricted pods."""
    _build(folder)
    keys, data = folder / "keys", folder / "data"
    keys.mkdir()
    store, peers = f"http://{free_address()}", f"http://{free_address()}"
    server = ApiServer(free_address(), keys / "apiserver.crt")
    key = ["openssl", "genpkey", "-algorithm", "RSA", "-out", str(keys / "accounts.key")]
    subprocess.run(key, check=True, capture_output=True, timeout=_CALL_S)
    (keys / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
    etcd = [
        folder / "etcd", "--data-dir", data,
        "--listen-client-urls", store, "--advertise-client-urls", store,
        "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
        "--initial-cluster", f"default={peers}",
    ]  # fmt: skip
    api = [
        folder / "kube-apiserver", "--etcd-servers", store, "--cert-dir", keys,
        "--bind-address", "127.0.0.1", "--secure-port", server.address.partition(":")[2],
        "--service-cluster-ip-range", "10.0.0.0/24", "--token-auth-file", keys / "tokens.csv",
        "--service-account-issuer", "https://127.0.0.1",
        "--service-account-signing-key-file", keys / "accounts.key",
        "--service-account-key-file", keys / "accounts.key",
        # no controller makes the account of a pod
        "--disable-admission-plugins", "ServiceAccount",
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (etcd, api):
            log = folder / f"{Path(str(command[0])).name}.log"
            running.append(start_command(command, log))
        is_ready = wait_until(lambda: server.serves("/readyz"), _START_S, poll_s=0.5)
        assert is_ready, (folder / "kube-apiserver.log").read_text()[-3000:]
        _add_types(server)
        yield server
    finally:
        end_processes(running[::-1], _END_S)


def _build(folder: Path) -> None:
    """Put the programs into the folder. Raises subprocess.SubprocessError."""
    modules = folder / "modules"
    modules.mkdir()
    shutil.copy(Path(__file__).with_name("go.mod"), modules)
    for name, package in _PROGRAMS.items():
        # -mod=mod: the registry completes go.mod
        _go("build", "-mod=mod", "-o", folder / name, package, cwd=modules)


def _add_types(server: ApiServer) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.create({"kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    for module, name in _TYPES.items():
        found = json.loads(_go("mod", "download", "-json", module))
        server.create(yaml.safe_load(Path(found["Dir"], name).read_text("utf-8")))
    paths = [_PATHS[kind] for kind in ("MPIJob", "SparkApplication")]
    assert wait_until(lambda: all(map(server.serves, paths)), _START_S, poll_s=0.2)


def _go(*words: object, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        ["go", *map(str, words)],
        cwd=cwd, capture_output=True, text=True, timeout=_BUILD_S, check=True,
    )  # fmt: skip
    return ended.stdout
