import os
import re
import tomllib
from pathlib import Path

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import load_spec, parse_spec, shipped_experiments, with_trials

GOOD = spec_text()


def faults_of(text: str) -> str:
    with pytest.raises(UsageError) as raised:
        parse_spec(text, "mine.toml")
    assert raised.value.exit_code == 2
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(shipped_experiments()))
def test_shipped_experiment_is_valid(name):
    experiment, text = load_spec(name)
    assert experiment.name == name
    assert text == shipped_experiments()[name]


def test_python_values_give_the_spec_that_their_toml_gives():
    document = tomllib.loads(GOOD)
    experiment, text = load_spec(document)
    assert experiment == parse_spec(GOOD, "mine.toml")
    assert tomllib.loads(text) == document
    assert load_spec(experiment) == (experiment, text)
    assert load_spec(load_spec(document)) == (experiment, text)


def test_faults_of_python_values_are_reported():
    document = tomllib.loads(GOOD)
    with pytest.raises(UsageError, match=r"the spec: 1 fault:\n  - sede: no such key\. Did you"):
        load_spec({**document, "sede": 1})
    with pytest.raises(UsageError, match="leave out a key instead of None"):
        load_spec({**document, "tune": None})
    with pytest.raises(UsageError, match=r"workloads: .* at least 1 item"):
        load_spec({**document, "workloads": []})


def test_shipped_experiments_are_those_documented():
    assert {"quickstart", "lerat2022-distributed", "strategies"} <= set(shipped_experiments())


@pytest.mark.parametrize(
    "page",
    [
        "docs/reference/spec.md",
        "docs/tutorials/first-comparison.md",
        *(f"docs/how-to/{name}.md" for name in ("clusters", "lab", "own-script")),
    ],
)
def test_whole_specs_in_the_documentation_are_valid(page):
    text = (Path(__file__).parents[4] / page).read_text("utf-8")
    specs = re.findall(r"```toml\n(schema = .*?)```", text, re.DOTALL)
    assert specs
    for spec in specs:
        parse_spec(spec, page)


def test_unknown_name_lists_shipped_and_guesses():
    with pytest.raises(UsageError, match='Did you mean "quickstart"'):
        load_spec("quikstart")


def test_directory_as_spec_is_usage_error(tmp_path):
    with pytest.raises(UsageError, match="readable TOML"):
        load_spec(str(tmp_path))


def test_broken_toml_names_file_and_line():
    message = faults_of("schema = = 1")
    assert "mine.toml: not TOML" in message
    assert "line 1" in message


def test_every_fault_is_reported_at_once():
    message = faults_of(
        """
        schema = 2
        name = "a b"
        repeets = 3
        [training]
        presicion = "fp32"
        global_batch = "many"
        [[workloads]]
        name = "tinyy"
        [[trials]]
        launcher = "mpi"
        local_strategy = "sequential"
        ranks_per_node = 0
        """
    )
    assert "6 faults" in message
    for part in (
        "name: expected letters",
        'repeets: no such key. Did you mean "repeats"?',
        'training.presicion: no such key. Did you mean "precision"?',
        "training.global_batch: input should be a valid integer, got 'many'",
        'workloads[1].name: expected one of "complex-small", "simple-big", "tiny", "cifar-cnn", ',
        'got "tinyy". Did you mean "tiny"?',
        "trials[1].ranks_per_node",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("schema = 2", "schema = 1"), "schema: expected one of 2, got 1"),
        (GOOD.replace("schema = 2", ""), "schema: expected, but missing"),
        (GOOD.replace("[[trials]]", "[[trials]]\nthreads_per_rank = 2"), '"intraop"'),
        (GOOD.replace("sequential", "intraop"), "expected the baseline"),
        (GOOD + '[[workloads]]\nname = "tiny"\n', "each name once"),
        (GOOD + "[training]\nmax_steps = 4\nwarmup_steps = 4\n", "leaves nothing to measure"),
        (GOOD + "[training]\nevaluate_every_steps = 4\n", "needs samples to evaluate on"),
        (
            GOOD.replace("[[trials]]", 'data = "d"\nheld_out_data = "e"\n[[trials]]', 1)
            + "[training]\nheld_out_samples = 4\n",
            "expected held_out_data or held_out_samples, got both",
        ),
        (
            GOOD.replace("[[trials]]", 'held_out_data = "e"\n[[trials]]', 1),
            "held_out_data needs data to train on",
        ),
        (
            GOOD.replace('name = "tiny"', 'name = "deeplab"') + '[training]\nreading = "cold"\n',
            'reading = "cold" expected a data set in a folder, got samples that the task makes',
        ),
        (
            GOOD.replace("[[trials]]", 'data = "s3://b/d"\nreading = "cold"\n[[trials]]', 1),
            'reading = "cold" expected a data set in a folder, got s3://b/d; use "stream"',
        ),
        (GOOD + "[failures]\nmean_s = 5\n", "expected restarts >= 1, got restarts = 0"),
        (GOOD + "[telemetry]\ntls_key = 'k'\n", "tls_certificate and tls_key go together"),
        (GOOD + "[telemetry]\ntls_client_ca = 'c'\n", "needs tls_certificate and tls_key"),
        (GOOD + "[telemetry]\nbasic_auth_file = 'b'\nbearer_token_file = 't'\n", "got both"),
        (
            GOOD + "[training]\nheld_out_samples = 4\n"
            "evaluate_every_steps = 4\nevaluate_every_epochs = 4\n",
            "evaluate_every_steps or evaluate_every_epochs, got both",
        ),
        (
            GOOD + '[training]\nheld_out_samples = 4\ntarget = { metric = "loss" }\n',
            "expected either at_least or at_most",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_reason(text, expected):
    assert expected in faults_of(text)


@pytest.mark.parametrize(
    "text",
    [
        GOOD + "[training]\nmax_stepz = 1\nmax_steps = 4\nwarmup_steps = 9\n",
        GOOD.replace("[[trials]]", "samples = 1\nmax_steps = 4\nwarmup_steps = 9\n[[trials]]"),
    ],
)
def test_other_values_of_a_faulty_table_are_checked_too(text):
    message = faults_of(text)
    assert "2 faults" in message
    assert "warmup_steps = 9 leaves nothing to measure of 4 steps; use at most 3" in message


def test_numbers_are_not_made_from_text():
    assert "seed" in faults_of(GOOD.replace("schema = 2", 'schema = 2\nseed = "1"'))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("max_steps=3", 'max_steps: no such key. Did you mean "training.max_steps"?'),
        ("run_s=3", 'run_s: no such key. Did you mean "limits.run_s"?'),
        ("every_steps=3", 'every_steps: no such key. Did you mean "checkpoint.every_steps"?'),
        ("trials.0.max_steps=3", 'max_steps: no such key. Did you mean "training.max_steps"?'),
    ],
)
def test_key_of_another_table_is_answered_with_its_place(setting, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_spec(tomllib.loads(GOOD), [setting])


def test_added_trials_may_not_change_the_transport_of_others() -> None:
    mpi = 'launcher = "mpi"; local_strategy = "processes"; ranks_per_node = 2; nodes = 2'
    spec = load_spec(tomllib.loads(spec_text(mpi, tables='[network]; interface = "eth0"')))
    added = 'launcher="spark", local_strategy="processes", ranks_per_node=2, nodes=2'
    with pytest.raises(UsageError, match=r'trials\[2\] .*its default is "gloo"; name a transport'):
        with_trials(spec, [added])
    found = with_trials(spec, [f'{added}, transport="gloo"'])
    assert found.experiment.trials[:2] == spec.experiment.trials
    assert found.experiment.trials[2].launcher == "spark"
    assert load_spec(tomllib.loads(found.text)).experiment == found.experiment


DEEP = 20_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * DEEP + "]" * DEEP,
        "x = " + "{a=" * DEEP + "1" + "}" * DEEP,
        ".".join(["a"] * DEEP) + " = 1",
        "[" + " . ".join(['"a"'] * DEEP) + "]",
        "x = " + "[" * 70 + "]" * 70,
        "x = " + "9" * 5001,
        "x = 0x" + "f" * 5001,
        "x = 9223372036854775808",
        "".join(f"k{number} = 1\n" for number in range(100_000)),
        'x = "\\u0000"',
        '"\\u0000" = 1',
        "x = ['a', {b = 'c\\u0000'}]".replace("'", '"'),
    ],
    ids=[
        "lists",
        "tables",
        "dotted",
        "header",
        "70",
        "digits",
        "hex",
        "65 bits",
        "keys",
        "zero",
        "zero in a key",
        "zero below",
    ],
)
def test_values_that_no_spec_has_are_refused(text: str) -> None:
    assert "mine.toml: not TOML: " in faults_of(f"{text}\n{GOOD}")


@pytest.mark.parametrize("value", ["[" * DEEP, "{a=" * DEEP, "9" * 5001, '"\\u0000"', ""])
def test_a_setting_with_such_a_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="expected a TOML value"):
        load_spec("quickstart", [f"training.max_steps={value}"])


def test_nested_python_values_are_refused() -> None:
    deep: list[object] = []
    for _ in range(DEEP):
        deep = [deep]
    with pytest.raises(UsageError, match="the spec: "):
        load_spec({**tomllib.loads(GOOD), "x": deep})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("count", [1_001, 20_000])
def test_too_many_trials_are_refused_at_once(count: int) -> None:
    head, _, trial = GOOD.rpartition("[[trials]]")
    text = head + f"[[trials]]{trial}\n" * count
    assert "trials: " in faults_of(text)


def test_many_faults_make_a_message_that_can_be_read() -> None:
    unknown = "".join(f"k{number} = 1\n" for number in range(900))
    message = faults_of(unknown + GOOD)
    assert "and 875 more" in message
    assert len(message) < 20_000


@pytest.mark.timeout(30)
def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.toml")
    with pytest.raises(UsageError, match=r"spec\.toml"):
        load_spec(tmp_path / "spec.toml")


def test_a_pipe_with_a_writer_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, GOOD.encode())
    os.close(write)
    assert load_spec(f"/dev/fd/{read}").text == GOOD
    os.close(read)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "/", "a/" * 3000])
def test_a_path_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected a"):
        load_spec(name)


@pytest.mark.parametrize("key", ["max_steps", "global_batch", "samples", "nodes", "ranks_per_node"])
def test_more_than_a_training_can_have_is_refused(key: str) -> None:
    workload = 'name = "tiny"' + ("\nsamples = 9223372036854775807" if key == "samples" else "")
    trial = f'launcher = "local"\nlocal_strategy = "sequential"\n{key} = {2**62}\n'
    training = f"[training]\n{key} = {2**62}\n" if key in ("max_steps", "global_batch") else ""
    text = f'schema = 2\nname = "x"\n{training}[[workloads]]\n{workload}\n[[trials]]\n' + (
        trial if key in ("nodes", "ranks_per_node") else trial.replace(f"{key} = {2**62}\n", "")
    )
    assert "less than or equal to" in faults_of(text)
