"""Advice on what Hadoop says without a ticket, a realm or a valid token (texts of Hadoop 3.3)."""

from __future__ import annotations

import pytest

from paceline.base.host.messages import kerberos_advice

REFUSED = (
    "DestHost:destPort head:8020 , LocalHost:localPort node1/192.0.2.1:0. Failed on local "
    "exception: java.io.IOException: org.apache.hadoop.security.AccessControlException: "
)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (f"{REFUSED}Client cannot authenticate via:[TOKEN, KERBEROS]", "with `kinit`"),
        (
            "SIMPLE authentication is not enabled.  Available:[TOKEN, KERBEROS]",
            "set HADOOP_CONF_DIR",
        ),
        ("java.lang.IllegalArgumentException: Can't get Kerberos realm", "/etc/krb5.conf"),
        (
            "token (HDFS_DELEGATION_TOKEN token 7 for ingrid) can't be found in cache",
            "no longer valid",
        ),
        ("token (HDFS_DELEGATION_TOKEN token 7 for ingrid) is expired", "no longer valid"),
    ],
)
def test_message_of_hadoop_is_explained(message: str, advice: str) -> None:
    assert advice in (kerberos_advice(message) or "")


def test_other_messages_need_no_advice() -> None:
    assert kerberos_advice("Connection refused; the certificate is expired") is None
