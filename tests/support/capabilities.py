"""Tools and rights that tests need beyond what pip installs, and the switch that makes them
mandatory.

A test declares them: `@pytest.mark.needs("lab")`. It is skipped on a machine without them.
`PACELINE_TEST_REQUIRE` lists capabilities that must not be skipped: `PACELINE_TEST_REQUIRE=lab`
fails every test that needs a lab and was skipped. Some are used only if they are listed, because
their tests take many minutes. `auto` stands for all others that `detected()` finds on this machine.
`detected()` shares no code with the product and the fixtures:
a fault in either of them must not turn tests into skips that nobody sees.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tests.support import hadoop_jars

from paceline.runner.lab import why_not as why_no_lab

REQUIRE = "PACELINE_TEST_REQUIRE"
# Where Debian installs ip and tc; the PATH of a plain user does not contain it.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_LIMIT_S = 20.0


def path_with_system_folders(path: str) -> str:
    """Append the folders of system tools that `path` lacks."""
    present = path.split(os.pathsep)
    return os.pathsep.join([*present, *(f for f in SYSTEM_FOLDERS if f not in present)])


def _why_no_prometheus() -> str | None:
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"not on PATH: {', '.join(missing)}" if missing else None


def _why_no_tmpfs() -> str | None:
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    ended = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return ended.stderr.strip() or "mount failed" if ended.returncode else None


# mpi/pmix of Debian's Slurm loads it by this name, which only libpmix-dev has.
_PMIX = ("libpmix.so", "pmix2/lib/libpmix.so")
_SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc")


def _why_no_slurm() -> str | None:
    missing = [name for name in _SLURM if shutil.which(name) is None]
    if not missing and not _has_pmix():
        missing = ["libpmix.so"]
    return f"not installed: {', '.join(missing)}" if missing else None


def _has_pmix() -> bool:
    folder = Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or "")
    return any((folder / name).exists() for name in _PMIX)


# Of Debian's packages krb5-kdc, krb5-admin-server, krb5-user and krb5-config.
_KERBEROS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")
_KERBEROS_FILE = Path("/etc/krb5.conf")


def _why_no_kerberos() -> str | None:
    missing = [name for name in _KERBEROS if shutil.which(name) is None]
    if not _KERBEROS_FILE.exists():
        missing.append(str(_KERBEROS_FILE))
    return f"not installed: {', '.join(missing)}" if missing else None


def _why_no_compiler() -> str | None:
    return None if shutil.which("g++") else "not on PATH: g++"


def _why_not_installed(*modules: str) -> str | None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def _why_no_images() -> str | None:
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"not on PATH: {', '.join(missing)}"
    reason = "debootstrap and buildah's chroot isolation need root"
    return reason if os.geteuid() != 0 else _why_not_listed("images")


def _why_no_kubernetes() -> str | None:
    if shutil.which("go") is None:
        return "not on PATH: go"
    return _why_not_listed("kubernetes")


def _why_not_listed(capability: str) -> str | None:
    takes = "takes many minutes, gigabytes and the package index"
    return None if capability in required() else f"{takes}; {REQUIRE}={capability} asks for it"


# The reason why the tests cannot use a capability, None if they can.
WHY_NOT: dict[str, Callable[[], str | None]] = {
    "lab": why_no_lab,
    "hadoop": hadoop_jars.why_not,
    "kerberos": _why_no_kerberos,
    "prometheus": _why_no_prometheus,
    "slurm": _why_no_slurm,
    "tmpfs": _why_no_tmpfs,
    "mock-gpu": _why_no_compiler,
    "onnx": functools.partial(_why_not_installed, "onnx", "onnxscript", "onnxruntime"),
    "accelerate": functools.partial(_why_not_installed, "accelerate"),
    "transformers": functools.partial(_why_not_installed, "transformers", "accelerate"),
    "lightning": functools.partial(_why_not_installed, "lightning"),
    "images": _why_no_images,
    "fresh-install": functools.partial(_why_not_listed, "fresh-install"),
    "kubernetes": _why_no_kubernetes,
    "ray": functools.partial(_why_not_listed, "ray"),
}


@functools.cache
def why_not(capability: str) -> str | None:
    """Return the reason why a capability is missing here, None if it is present."""
    return WHY_NOT[capability]()


@functools.cache
def detected() -> frozenset[str]:
    """Detect the capabilities of this machine without the product's own checks."""
    folders = path_with_system_folders(os.environ.get("PATH", os.defpath))

    def installed(*programs: str) -> bool:
        return all(shutil.which(program, path=folders) for program in programs)

    found = set()
    if os.geteuid() == 0 and installed("ip", "tc", "unshare") and _can_make_a_namespace():
        found |= {"lab", "tmpfs"}
    if installed("java", "mvn") and hadoop_jars.are_in_local_repository():
        found.add("hadoop")
    if installed(*_KERBEROS) and _KERBEROS_FILE.exists():
        found.add("kerberos")
    if installed("prometheus", "promtool"):
        found.add("prometheus")
    if installed(*_SLURM) and _has_pmix():
        found.add("slurm")
    if installed("g++"):
        found.add("mock-gpu")
    distributions = {each.name for each in metadata.distributions()}
    return frozenset(found | (distributions & {"onnx", "accelerate", "transformers", "lightning"}))


def _can_make_a_namespace() -> bool:
    ended = subprocess.run(
        ["unshare", "--net", "--mount", "true"],
        capture_output=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return ended.returncode == 0


@functools.cache
def required() -> frozenset[str]:
    """Return the capabilities whose tests must not be skipped."""
    names = set(os.environ.get(REQUIRE, "").replace(",", " ").split())
    listed = names - {"auto"}
    unknown = listed - WHY_NOT.keys()
    if unknown:
        raise ValueError(
            f"{REQUIRE}: expected auto or names of {', '.join(WHY_NOT)}, "
            f"got {', '.join(sorted(unknown))}"
        )
    return frozenset(listed | (detected() if "auto" in names else set()))
