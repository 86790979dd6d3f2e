"""A Kerberos realm of a cluster: Debian's KDC on the first host, which the others do not need.

Everything is in one folder. Hadoop maps the first part of a principal to a user.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.runner.lab.record import Host

NAME = "LAB.EXAMPLE"
USER = f"root@{NAME}"
_SERVICES = ("nn", "dn", "rm", "nm", "HTTP")
_PORT, _LIMIT_S = 88, 60.0
_WEB = "dfs.web.authentication"
_SETTINGS: dict[str, dict[str, object]] = {
    "core-site.xml": {"hadoop.security.authentication": "kerberos"},
    "hdfs-site.xml": {
        "dfs.block.access.token.enable": "true",
        "dfs.data.transfer.protection": "authentication",
        "ignore.secure.ports.for.testing": "true",  # else a DataNode needs TLS as well
        "dfs.permissions.superusergroup": "root",
    },
    # Files of a container disappear with it, so do its delegation tokens.
    "yarn-site.xml": {"yarn.nodemanager.delete.debug-delay-sec": 0},
}


@dataclass(frozen=True, slots=True)
class Realm:
    """The files of a realm."""

    folder: Path

    @property
    def configuration(self) -> Path:
        """Return the file that is /etc/krb5.conf for each process of the cluster."""
        return self.folder / "krb5.conf"

    @property
    def user_keys(self) -> Path:
        """Return the keytab of the user."""
        return self.folder / "user.keytab"

    @property
    def tickets(self) -> str:
        """Return the value of KRB5CCNAME with which the user has a ticket after `log_in`."""
        return f"FILE:{self.folder}/tickets"

    @property
    def log_in(self) -> Sequence[object]:
        """Return the command that gets a ticket for the user."""
        return ("kinit", "-c", self.tickets, "-k", "-t", self.user_keys, USER)

    @property
    def server(self) -> Sequence[str]:
        """Return the command of the KDC, which stays in the foreground."""
        return ("krb5kdc", "-n", "-r", NAME)

    def settings(self) -> dict[str, dict[str, object]]:
        """Return the settings of Hadoop, by file."""
        identities = {
            "hdfs-site.xml": {
                "nn": ("dfs.namenode.kerberos.principal", "dfs.namenode.keytab.file"),
                "dn": ("dfs.datanode.kerberos.principal", "dfs.datanode.keytab.file"),
                "HTTP": (f"{_WEB}.kerberos.principal", f"{_WEB}.kerberos.keytab"),
            },
            "yarn-site.xml": {
                "rm": ("yarn.resourcemanager.principal", "yarn.resourcemanager.keytab"),
                "nm": ("yarn.nodemanager.principal", "yarn.nodemanager.keytab"),
            },
        }
        found = {file: dict(settings) for file, settings in _SETTINGS.items()}
        for file, services in identities.items():
            for service, (principal, keys) in services.items():
                found[file] |= {principal: f"{service}/_HOST@{NAME}", keys: self._service_keys}
        return found

    @property
    def _service_keys(self) -> Path:
        return self.folder / "services.keytab"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of programs that manage the realm."""
        return kept_environment(
            KRB5_CONFIG=str(self.configuration), KRB5_KDC_PROFILE=f"{self.folder}/kdc.conf"
        )

    def make(self, hosts: Sequence[Host]) -> None:
        """Make the database and the keys of the user and of each host's services."""
        self.folder.mkdir(mode=0o700)
        address = f"{hosts[0].address}:{_PORT}"
        self.configuration.write_text(_CLIENTS.format(name=NAME, address=address), "utf-8")
        server = _SERVER.format(name=NAME, address=address, folder=self.folder)
        (self.folder / "kdc.conf").write_text(server, "utf-8")
        self._call("kdb5_util", "-r", NAME, "create", "-s", "-P", secrets.token_hex())
        services = [f"{service}/{host.name}@{NAME}" for host in hosts for service in _SERVICES]
        for keys, principals in ((self._service_keys, services), (self.user_keys, [USER])):
            for principal in principals:
                self._call("kadmin.local", "-r", NAME, "addprinc", "-randkey", principal)
            self._call("kadmin.local", "-r", NAME, "ktadd", "-k", keys, *principals)

    def _call(self, *words: object) -> None:
        ended = run_command(words, _LIMIT_S, env=self.environment)
        assert ended.returncode == 0, ended.stdout + ended.stderr


# Without a name service; Java speaks TCP to this KDC at once.
_CLIENTS = """\
[libdefaults]
 default_realm = {name}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {name} = {{
  kdc = {address}
 }}
"""
_SERVER = """\
[kdcdefaults]
 kdc_listen = {address}
 kdc_tcp_listen = {address}
[realms]
 {name} = {{
  database_name = {folder}/principals
  key_stash_file = {folder}/stash
 }}
[logging]
 kdc = STDERR
"""
