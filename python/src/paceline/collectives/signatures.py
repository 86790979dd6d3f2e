"""Signatures (HMAC) of what the ranks of a trial store, so that no other account speaks for them.

Every account of the machine, or of the network, can connect to the store and set its keys. The
ranks share a secret in their environment, which the kernel shows to their own user only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from paceline.collectives.errors import EnvironmentLacks

SECRET_VARIABLE = "PACELINE_STORE_SECRET"  # noqa: S105  (a name)
_SECRET_BYTES = 32


def new_secret() -> str:
    """Return a secret for the ranks of one trial."""
    return secrets.token_hex(_SECRET_BYTES)


def use_secret(secret: str) -> None:
    """Sign from now on with the secret, also in processes that this one starts; "": not at all."""
    os.environ[SECRET_VARIABLE] = secret


def signed(key: str, text: str) -> str:
    """Return what a rank stores under the key in place of the text."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    return f"{_signature(secret, key, text)} {text}" if secret else text


def authentic(key: str, stored: bytes) -> str:
    """Return the text that a rank of this trial stored under the key.

    Raises EnvironmentLacks if another process stored it.
    """
    found = stored.decode(errors="replace")
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        return found
    signature, _, text = found.partition(" ")
    if hmac.compare_digest(signature.encode(), _signature(secret, key, text).encode()):
        return text
    raise EnvironmentLacks(
        f"the ranks' store, key {key!r}: expected a value that a rank of this trial signed, found "
        "another one. Either another account of this machine or of the network has set it, or a "
        "rank was started without the secret of rank 0's address (StoreAddress.for_peers)"
    )


def _signature(secret: str, key: str, text: str) -> str:
    return hmac.new(secret.encode(), f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()
