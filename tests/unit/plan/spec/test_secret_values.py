"""Secrets in a spec are refused, and the message does not repeat them."""

from __future__ import annotations

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import parse_spec
from paceline.plan.spec.secret_values import holds_secret, is_secret
from paceline.plan.spec.values import local_path
from paceline.runner.launchers.base import Command

SECRET = "hunter2-9f1c"
SPEC = spec_text(
    'launcher = "mpi"; transport = "mpi"; local_strategy = "processes"; ranks_per_node = 2; '
    "{trial}; {tables}",
    workload='name = "tiny"; {data}',
    repeats=1,
)


@pytest.mark.parametrize(
    ("where", "text", "place"),
    [
        ("data", f'data = "s3://key:{SECRET}@bucket/set"', "workloads[1].data"),
        (
            "data",
            f'data = "d"\nheld_out_data = "s3://key:{SECRET}@bucket/set"',
            "workloads[1].held_out_data",
        ),
        ("data", f'data = "s3://bucket/set?secret_key={SECRET}"', "workloads[1].data"),
        ("tables", f'[spark.conf]\n"spark.hadoop.fs.s3a.secret.key" = "{SECRET}"', "spark.conf."),
        ("tables", f'[spark.conf]\n"spark.authenticate.secret" = "{SECRET}"', "spark.conf."),
        ("tables", f'[mpi]\narguments = ["-x", "HF_TOKEN={SECRET}"]', "mpi.arguments[1]"),
        ("trial", f'mpi_parameters = {{ my_password = "{SECRET}" }}', "trials[2].mpi_parameters"),
    ],
)
def test_secret_is_refused_and_not_repeated(where: str, text: str, place: str) -> None:
    spec = SPEC.format(**{"data": "", "trial": "", "tables": "", where: text})
    with pytest.raises(UsageError, match="must not contain a secret") as refused:
        parse_spec(spec, "spec.toml")
    assert place in str(refused.value)
    assert SECRET not in str(refused.value)


def test_secret_in_the_description_is_refused() -> None:
    spec = SPEC.format(data="", trial="", tables="")
    with pytest.raises(UsageError, match="description: a spec must not contain a secret"):
        parse_spec(f'description = "password = {SECRET}"\n{spec}', "spec.toml")


@pytest.mark.parametrize(
    "name",
    [
        "spark.authenticate.secret",
        "spark.ssl.keyPassword",
        "HF_TOKEN",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.accesskey",
        "AWS_ACCESS_KEY_ID",
        "spark.hadoop.fs.azure.account.key.mine.dfs.core.windows.net",
        "WANDB_API_KEY",
        "apikey",
        "PGPASSWD",
        "SSH_PASSPHRASE",
        "GOOGLE_CREDENTIAL",
        "SMTP_PASS",
        "db.pwd",
        "profile_token",  # neither a file, nor a directory, nor a path, but "file" is in it
        "path_secret",
        "fs.azure.sas.container.mine",
        "ssl.private.key",
        "fs.s3a.encryption.key",
        "sasl.jaas.config",
        "AUTHORIZATION",
        "HTTP_BEARER",
        "SENTRY_DSN",
        "directory.password",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, SECRET)


@pytest.mark.parametrize(
    "name",
    [
        "tokenFile",
        "secret_dir",
        "PASSWORD_PATH",
        "GOOGLE_APPLICATION_CREDENTIALS",  # a path
        "spark.hadoop.fs.s3a.aws.credentials.provider",  # a class
        "spark.hadoop.fs.azure.account.keyprovider.mine",
        "spark.app.name",
        "bypass",
        "compass.mode",
    ],
)
def test_names_of_harmless_values(name: str) -> None:
    assert not is_secret(name, SECRET)


@pytest.mark.parametrize(
    "value",
    [
        "postgresql://me:hunter2@db/x",
        "redis://:hunter2@cache:6379",
        "Server=db;User=me;Password=hunter2",
        "https://mine.blob.core.windows.net/set?se=2027&sig=aB3%2Fd9fa",
        "-Xmx1g -Djavax.net.ssl.trustStorePassword=hunter2",
        'Module required username="me" password="hunter2";',
        "-----BEGIN PRIVATE KEY-----",
        "Basic bWU6aHVudGVyMg==",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    ],
)
def test_values_that_are_secrets_under_any_name(value: str) -> None:
    assert is_secret("DATABASE_URL", value)


@pytest.mark.parametrize(
    "value",
    [
        "https://proxy.example:3128",
        "-Dhdp.version=3.3 -Djava.security.krb5.conf=/etc/krb5.conf -Dssl.tokenFile=/run/t",
        "s3://bucket/set?region=eu-west-1",
        "org.apache.hadoop.fs.s3a.S3AFileSystem",
    ],
)
def test_values_that_are_no_secrets(value: str) -> None:
    assert not is_secret("DATABASE_URL", value)


UNKNOWN = "wJalrXUtnFEMIK7MDENG"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f'[spark.conf]\n"spark.hadoop.mine.value" = "{UNKNOWN}"', "spark.conf.spark.hadoop"),
        (f'[spark.conf]\n"spark.executorEnv.MINE" = "{UNKNOWN}"', "spark.conf.spark.executorEnv"),
        (f'[mpi]\narguments = ["-x", "MINE={UNKNOWN}"]', "mpi.arguments[1]"),
        (f'[mpi]\narguments = ["--x", "MINE={UNKNOWN}"]', "mpi.arguments[1]"),
        (
            f'[mpi]\narguments = ["--mca", "mca_base_env_list", "A=1;MINE={UNKNOWN}"]',
            "mpi.arguments[2]",
        ),
        (
            f'[spark.conf]\n"spark.driver.extraJavaOptions" = "-Xmx1g -Dmine.k={UNKNOWN}"',
            "spark.conf.spark.driver.extraJavaOptions",
        ),
    ],
)
def test_unknown_variables_and_properties_are_not_recorded(text: str, place: str) -> None:
    spec = SPEC.format(data="", trial="", tables=text)
    with pytest.raises(UsageError, match="a name that Paceline does not know") as refused:
        parse_spec(spec, "spec.toml")
    assert place in str(refused.value)
    assert UNKNOWN not in str(refused.value)


def test_unknown_variables_among_parameters_of_mpi_are_not_recorded() -> None:
    given = f'mpi_parameters = {{ mca_base_env_list = "A=1;MINE={UNKNOWN}" }}'
    with pytest.raises(UsageError, match="a name that Paceline does not know") as refused:
        parse_spec(SPEC.format(data="", trial=given, tables=""), "spec.toml")
    assert "mca_base_env_list" in str(refused.value)
    assert UNKNOWN not in str(refused.value)


def test_unknown_variables_of_a_trial_are_not_recorded() -> None:
    for value, refused in ((UNKNOWN, True), ("recompiles", False)):
        spec = SPEC.format(data="", trial=f'environment = {{ MINE = "{value}" }}', tables="")
        with pytest.raises(UsageError) as found:  # the spec has no script
            parse_spec(spec, "spec.toml")
        assert ("trials[2].environment.MINE: a spec must not" in str(found.value)) is refused
        assert UNKNOWN not in str(found.value)


def test_harmless_settings_are_accepted() -> None:
    tables = """
[spark.conf]
"spark.hadoop.fs.s3a.endpoint.region" = "eu-central-1"
"spark.hadoop.fs.s3a.impl" = "org.apache.hadoop.fs.s3a.S3AFileSystem"
"spark.hadoop.fs.s3a.connection.timeout" = "200000 ms"
"spark.executorEnv.LD_LIBRARY_PATH" = "/opt/a/lib:/opt/b/lib"
"spark.executorEnv.ATTENTION" = "flash"
"spark.yarn.queue" = "a-queue-with-a-long-name-2026"
"spark.hadoop.dfs.block.access.token.enable" = "true"
"spark.kubernetes.authenticate.driver.oauthTokenFile" = "/run/token"
"spark.driver.extraJavaOptions" = "-Dlog4j.configuration=file:log4j-driver.properties -Dsun.x=true"
"spark.hadoop.fs.s3a.endpoint" = "http://127.0.0.1:9000"
[mpi]
arguments = [
    "-x", "NCCL_SOCKET_IFNAME=eth0,eth1,eth2", "-x", "HF_TOKEN",
    "--mca", "btl_tcp_if_include=eth0,eth1",
]
"""
    parse_spec(SPEC.format(data="", trial="", tables=tables), "spec.toml")
    assert not holds_secret("hdfs://user@namenode/data")
    assert not holds_secret("s3://bucket/set?region=eu-west-1&anonymous=true")


def test_record_hides_secrets_in_options_of_java() -> None:
    options = "spark.driver.defaultJavaOptions=-Da.b=c -Dx.password=hunter2 -Xmx1g"
    command = Command(argv=("spark-submit", "--conf", options), environment={"A": "b"})
    assert command.shell_line() == (
        "A=b spark-submit --conf "
        "'spark.driver.defaultJavaOptions=-Da.b=c -Dx.password=(hidden) -Xmx1g'"
    )


@pytest.mark.parametrize("switch", ["", "true", "False"])
def test_switch_of_a_secret_is_none(switch: str) -> None:
    assert not is_secret("spark.token.enable", switch)


@pytest.mark.parametrize("option", ["access_key", "secret_key", "session_token"])
def test_options_of_a_url_that_hold_a_secret(option: str) -> None:
    assert holds_secret(f"s3://bucket/set?region=eu-west-1&{option}={SECRET}")


def test_a_refused_url_is_shown_without_its_password() -> None:
    with pytest.raises(UsageError, match="https://host/set") as refused:
        local_path(f"https://user:{SECRET}@host/set?token={SECRET}")
    assert SECRET not in str(refused.value)
