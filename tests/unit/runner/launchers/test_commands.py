"""What each launcher starts, word for word, and what it refuses to start."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import Tool
from paceline.base.host.spark import COLLECTOR, QUICK_JVM
from paceline.runner.launchers import torchrun
from paceline.runner.launchers.base import Command, TemporaryFolders, launcher_for
from paceline.runner.launchers.descriptors import hostfile_slots
from paceline.runner.launchers.mpi import implementations
from paceline.runner.launchers.mpi import implementations as tools
from paceline.runner.launchers.mpi import launcher as mpi
from paceline.runner.launchers.mpi.implementations import (
    Implementation,
    IntelMpi,
    Mpich,
    Mpirun,
    OpenMpi4,
    OpenMpi5,
)
from paceline.runner.launchers.spark import launcher as spark
from paceline.runner.launchers.spark.configuration import check_conf
from paceline.runner.preflight import this_host

THREADS = {
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    "OPENBLAS_NUM_THREADS": "3",
    "NUMEXPR_NUM_THREADS": "3",
    "OMP_DYNAMIC": "FALSE",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Tools in known places, eight cores, not root."""
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    monkeypatch.setattr(mpi, "find_mpirun", lambda asked: mpirun(asked or "/opt/bin/mpirun"))
    monkeypatch.setattr(mpi, "mpi_mismatch", lambda _tool: None)
    monkeypatch.setattr(mpi, "job_script", lambda folder, name: Path("/jobs", folder, name))
    monkeypatch.setattr(implementations.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(implementations, "usable_cores", lambda: 8)
    monkeypatch.setattr(this_host, "usable_cores", lambda: 8)
    monkeypatch.setattr(spark, "find_java", lambda: tool("/jdk/bin/java"))
    monkeypatch.setattr(spark, "find_java_for_spark", lambda: tool("/jdk/bin/java"))
    monkeypatch.setattr(spark, "find_spark", lambda: tool("/opt/spark"))
    monkeypatch.setattr(spark, "job_script", lambda folder, name: Path("/jobs", folder, name))
    monkeypatch.setattr(torchrun, "find_torchrun", lambda: tool("/venv/bin/python"))


def tool(path: str) -> Tool:
    return Tool(path=Path(path), version="1", why="test")


def mpirun(path: str, implementation: Implementation | None = None) -> Mpirun:
    found = implementation or OpenMpi5()
    return Mpirun(path=Path(path), version="1", why="test", implementation=found)


@pytest.fixture
def started(make_launch_trial, files) -> Callable[..., Command]:
    """Return what a launcher starts for a trial."""

    def command(launcher: str, **trial) -> Command:
        return launcher_for(launcher).command(make_launch_trial(launcher, **trial), files)

    return command


@pytest.fixture
def preflight(make_launch_trial, tmp_path) -> Callable[..., None]:
    """Let a launcher check a trial, whose data set is there."""

    def check(launcher: str, dataset: Path = tmp_path, **trial) -> None:
        made = make_launch_trial(launcher, dataset=str(dataset), **trial)
        launcher_for(launcher).preflight(made)

    return check


def test_local_is_the_job_module_itself(started, files):
    made = started("local", threads=3)
    assert made.argv == (
        "/venv/bin/python", "-m", "paceline.runner.launchers.local", "--trial", str(files.trial),
    )  # fmt: skip
    assert made.environment == THREADS


def test_thread_pools_are_of_one_replica_where_a_rank_has_several(started):
    made = started("spark", ranks=1, threads=6, replicas=2, local_strategy="threads")
    assert {k: made.environment[k] for k in THREADS} == THREADS
    assert confs(made.argv)["spark.task.cpus"] == "6"


def test_torchrun_meets_over_a_file_and_opens_no_port(started, files):
    made = started("torchrun", ranks=4, threads=3)
    assert made.argv == (
        "/venv/bin/python", "-m", "torch.distributed.run",
        "--nnodes=1", "--nproc-per-node=4", "--max-restarts=0",
        "--rdzv-id=the-trial", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={files.root}/torchrun.rendezvous",
        "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1",
        "-m", "paceline.runner.launchers.torchrun", "--trial", str(files.trial),
    )  # fmt: skip
    assert made.environment == {**THREADS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_mpirun_on_one_node_keeps_to_shared_memory_and_loopback(started, files):
    made = started("mpi", ranks=2, threads=3)
    assert made.argv == (
        "/opt/bin/mpirun", "-n", "2", "--bind-to", "none", "--host", "localhost:2",
        "--mca", "btl", "self,sm", "--pmixmca", "ptl_base_if_include", "lo",
        "/venv/bin/python", "/jobs/mpi-jobs/train.py", "--trial", str(files.trial),
    )  # fmt: skip
    assert made.environment == THREADS


def test_mpirun_offers_real_slots_only_when_oversubscribing(started):
    argv = started("mpi", ranks=16, oversubscribe=True).argv
    assert argv[5:9] == ("--host", "localhost:8", "--map-by", ":OVERSUBSCRIBE")


def test_mpirun_on_several_nodes_uses_hostfile_interface_and_arguments(started):
    settings = {"hostfile": "/etc/hosts.mpi", "arguments": ("--mca", "pml", "ob1")}
    made = started("mpi", nodes=2, interface="eth7", launcher_options=settings)
    text = " ".join(made.argv)
    assert "-n 4 --bind-to none --hostfile /etc/hosts.mpi --map-by ppr:2:node --mca btl" in text
    assert "--mca btl_tcp_if_include eth7 --prtemca prte_if_include eth7" in text
    assert "-x OMP_NUM_THREADS" in text
    assert "--mca pml ob1 /venv/bin/python" in text
    text = " ".join(made.with_variables({"OF_THE_RUN": "1"}).argv)
    assert text.startswith("/opt/bin/mpirun -x OF_THE_RUN -n 4 ")


@pytest.mark.parametrize("launcher", ["local", "mpi", "torchrun", "spark"])
def test_ranks_of_this_node_inherit_the_variables_of_the_run(launcher, started):
    made = started(launcher, ranks=2)
    knowing = made.with_variables({"OF_THE_RUN": "1"})
    assert knowing.argv == made.argv
    assert knowing.environment == {**made.environment, "OF_THE_RUN": "1"}


@pytest.fixture
def with_mpi(monkeypatch):
    """Choose the implementation that mpirun belongs to."""

    def choose(implementation: Implementation) -> None:
        monkeypatch.setattr(
            mpi, "find_mpirun", lambda _asked: mpirun("/mpi/mpirun", implementation)
        )

    return choose


def test_open_mpi_4_has_other_names_for_the_same(started, with_mpi):
    with_mpi(OpenMpi4())
    made = started("mpi", ranks=2)
    assert made.argv[:12] == (
        "/mpi/mpirun", "-n", "2", "--bind-to", "none", "--host", "localhost:2",
        "--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include",
    )  # fmt: skip
    text = " ".join(started("mpi", nodes=2, interface="eth7").argv)
    assert "--map-by ppr:2:node --mca btl self,vader,tcp --mca btl_tcp_if_include eth7" in text
    assert "--mca oob_tcp_if_include eth7 -x OMP_NUM_THREADS" in text


def test_mpich_is_started_by_hydra(started, with_mpi):
    with_mpi(Mpich())
    made = started("mpi", ranks=2)
    assert made.argv[:-4] == (
        "/mpi/mpirun", "-n", "2", "-bind-to", "none", "-ppn", "2", "-launcher", "fork",
        "-iface", "lo",
    )  # fmt: skip
    settings = {"hostfile": "/etc/hosts.mpi"}
    argv = started("mpi", nodes=2, interface="eth7", launcher_options=settings).argv
    assert argv[5:11] == ("-ppn", "2", "-f", "/etc/hosts.mpi", "-iface", "eth7")


def test_intel_mpi_is_started_by_its_own_hydra(started, with_mpi):
    with_mpi(IntelMpi())
    made = started("mpi", ranks=2)
    assert made.argv[:-4] == (
        "/mpi/mpirun", "-n", "2", "-genv", "I_MPI_PIN", "off", "-ppn", "2", "-launcher", "fork",
        "-iface", "lo", "-genv", "I_MPI_FABRICS", "shm",
    )  # fmt: skip


def test_mca_parameters_are_refused_where_there_are_none(preflight, with_mpi):
    with_mpi(Mpich())
    with pytest.raises(EnvironmentLacks, match="belongs to MPICH, which has no MCA parameters"):
        preflight("mpi", launcher_options={"parameters": {"btl_tcp_links": "2"}})


def test_mpi_parameters_become_mca_arguments_before_those_of_the_spec(started):
    settings = {
        "arguments": ("--mca", "pml", "ob1"),
        "parameters": {"smsc": "^cma", "btl_sm_eager_limit": "32768"},
    }
    text = " ".join(started("mpi", launcher_options=settings).argv)
    assert "lo --mca btl_sm_eager_limit 32768 --mca smsc ^cma --mca pml ob1 /venv" in text


def test_parameter_that_mpirun_would_pass_over_in_silence_is_refused(preflight, monkeypatch):
    monkeypatch.setattr(tools, "known_parameters", lambda _mpirun: frozenset({"btl_tcp_links"}))
    with pytest.raises(EnvironmentLacks, match="no parameter btl_tpc_links, did you mean btl_tcp_"):
        preflight("mpi", launcher_options={"parameters": {"btl_tpc_links": "2"}})
    preflight("mpi", launcher_options={"parameters": {"btl_tcp_links": "2"}})


def test_mpirun_is_told_twice_that_root_is_meant(started, monkeypatch):
    monkeypatch.setattr(implementations.os, "geteuid", lambda: 0)
    environment = started("mpi").environment
    assert environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


FOLDERS = TemporaryFolders(Path("/tmp/x"), Path("/dev/shm/x"))


def test_temporary_files_of_mpirun_are_in_the_trials_folders(started):
    assert started("mpi").temporary(FOLDERS) == {
        "PRTE_MCA_prte_tmpdir_base": "/tmp/x",
        "OMPI_MCA_btl_sm_backing_directory": "/dev/shm/x",
    }


@pytest.mark.parametrize(("nodes", "options"), [(2, {}), (1, {"hostfile": "hosts"})])
def test_folders_of_this_host_are_not_given_to_ranks_elsewhere(started, nodes, options):
    assert started("mpi", nodes=nodes, launcher_options=options).temporary(FOLDERS) == {}


def test_temporary_files_of_spark_are_in_the_trials_folder(started, monkeypatch):
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xint")
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    java = {"SPARK_SUBMIT_OPTS": "-Xint -Djava.io.tmpdir=/tmp/x"}
    made = started("spark").temporary(FOLDERS)
    assert made == {**java, "SPARK_LOCAL_DIRS": "/tmp/x"}
    own = started("spark", launcher_options={"conf": {"spark.local.dir": "/big"}})
    assert own.temporary(FOLDERS) == java, "the user's own folder stays"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/big")
    assert started("spark").temporary(FOLDERS) == java


def test_a_space_in_the_temporary_folder_reaches_the_jvm_of_spark(started, monkeypatch):
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    folders = TemporaryFolders(Path("/my tmp/x"), Path("/dev/shm/x"))
    made = started("spark").temporary(folders)
    assert made["SPARK_SUBMIT_OPTS"] == "-Djava.io.tmpdir='/my tmp/x'"


def test_logs_of_torchruns_agent_go_with_the_trial(started):
    assert started("torchrun").temporary(FOLDERS)["PET_LOG_DIR"] == "/tmp/x"


def confs(argv) -> dict[str, str]:
    given = [argv[i + 1] for i, word in enumerate(argv) if word == "--conf"]
    return dict(item.split("=", 1) for item in given)


def test_spark_has_a_slot_for_every_thread_and_loopback_only(started, files, monkeypatch):
    monkeypatch.delenv("SPARK_LAUNCHER_OPTS", raising=False)
    made = started("spark", ranks=2, threads=3)
    assert made.argv[:3] == ("/opt/spark/bin/spark-submit", "--master", "local[6]")
    assert made.argv[-3:] == ("/jobs/spark-jobs/train.py", "--trial", str(files.trial))
    conf = confs(made.argv)
    assert conf["spark.task.cpus"] == "3"
    assert conf["spark.driver.host"] == conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert conf["spark.authenticate"] == "true"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.dynamicAllocation.enabled"] == "false"
    assert conf["spark.task.maxFailures"] == "1"
    assert conf["spark.barrier.sync.timeout"] == "60"
    assert conf["spark.pyspark.python"] == "/venv/bin/python"
    assert conf["spark.pyspark.driver.python"] == "/venv/bin/python"
    assert made.environment == {
        **THREADS,
        "JAVA_HOME": "/jdk",
        "SPARK_HOME": "/opt/spark",
        "SPARK_LAUNCHER_OPTS": QUICK_JVM,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def test_java_of_spark_maps_its_classes_from_archives(started, monkeypatch):
    monkeypatch.setattr(spark, "archive_option", lambda _java, _spark: "-XX:both")
    monkeypatch.setattr(spark, "archive_option_of_java", lambda _java: "-XX:of-java")
    monkeypatch.setenv("SPARK_LAUNCHER_OPTS", "-Dmine=1")
    made = started("spark")
    conf = confs(made.argv)
    assert conf["spark.driver.defaultJavaOptions"] == f"{QUICK_JVM} -XX:both"
    assert conf["spark.executor.defaultJavaOptions"] == QUICK_JVM  # its Java is not known
    assert made.environment["SPARK_LAUNCHER_OPTS"] == f"{QUICK_JVM} -XX:of-java -Dmine=1"


def test_options_of_the_site_and_of_the_spec_stay_beside_those_of_spark(
    started, monkeypatch, tmp_path
):
    (tmp_path / "spark-defaults.conf").write_text(
        "# the site's\n"
        "spark.driver.extraJavaOptions  -Djava.security.krb5.conf=/etc/site.conf\n"
        "spark.executor.extraJavaOptions=-Dhttp.proxyHost=proxy \\\n  -XX:+UseG1GC\n"
        "spark.driver.defaultJavaOptions: -Dhdp.version=3\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(spark, "archive_option", lambda _java, _spark: "")
    settings = {"master": "yarn", "conf": {"spark.driver.extraJavaOptions": "-XX:+UseZGC"}}
    conf = confs(started("spark", launcher_options=settings).argv)
    without_collector = " ".join(QUICK_JVM.replace(COLLECTOR, "").split())
    assert conf["spark.driver.defaultJavaOptions"] == f"{without_collector} -Dhdp.version=3"
    assert conf["spark.executor.defaultJavaOptions"] == without_collector
    # Of these two, spark-submit reads the first here and the second from the file.
    assert conf["spark.driver.extraJavaOptions"] == "-XX:+UseZGC"
    assert "spark.executor.extraJavaOptions" not in conf


def test_executors_have_room_for_the_ranks_of_a_node_also_on_one_node(started):
    def conf(**changed):
        return confs(started("spark", launcher_options={"master": "yarn"}, **changed).argv)

    one = conf(ranks=2, threads=3)
    assert (one["spark.executor.instances"], one["spark.executor.cores"]) == ("1", "6")
    two = conf(ranks=2, nodes=2, interface="eth0")
    assert (two["spark.executor.instances"], two["spark.executor.cores"]) == ("2", "2")
    overhead_mib = [int(each["spark.executor.memoryOverhead"].removesuffix("m")) for each in (
        conf(ranks=1), conf(ranks=2),
    )]  # fmt: skip
    assert overhead_mib[0] > 384 + 1024
    assert overhead_mib[1] - 384 == 2 * (overhead_mib[0] - 384)
    limited = conf(ranks=2, limits={"rank_memory_mib": 3000})
    assert limited["spark.executor.memoryOverhead"] == "6384m"


def test_spark_has_a_slot_for_every_thread_also_where_ranks_share_cores(started):
    shared = {"ranks": 4, "oversubscribe": True, "allocated_cores": 2}
    assert started("spark", **shared).argv[2] == "local[4]"
    made = started("spark", **shared, launcher_options={"master": "spark://head:7077"})
    assert confs(made.argv)["spark.cores.max"] == "4"


def test_spark_master_passes_through_and_conf_has_the_last_word(started):
    settings = {
        "master": "spark://head:7077",
        "conf": {"spark.executor.cores": "9", "spark.pyspark.python": "./env/bin/python"},
    }
    made = started("spark", nodes=2, interface="eth0", launcher_options=settings)
    conf = confs(made.argv)
    assert made.argv[2] == "spark://head:7077"
    assert conf["spark.executor.cores"] == "9"
    assert conf["spark.cores.max"] == "4"
    assert conf["spark.executorEnv.OMP_NUM_THREADS"] == "1"
    assert "spark.driver.host" not in conf
    assert conf["spark.pyspark.python"] == "./env/bin/python"
    assert conf["spark.pyspark.driver.python"] == "/venv/bin/python"
    assert "SPARK_LOCAL_IP" not in made.environment


def test_mpirun_that_was_chosen_here_is_chosen_by_the_executors(started, monkeypatch):
    monkeypatch.setenv("PACELINE_MPIRUN", "/opt/mpi/bin/mpirun")
    settings = {"master": "spark://head:7077"}
    made = started("spark", nodes=2, interface="eth0", launcher_options=settings)
    assert confs(made.argv)["spark.executorEnv.PACELINE_MPIRUN"] == "/opt/mpi/bin/mpirun"


def test_shell_line_can_be_pasted():
    made = Command(argv=("run", "local[2]", "a b"), environment={"X": "it's"})
    assert made.shell_line() == """X='it'"'"'s' run 'local[2]' 'a b'"""


@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpi", "spark"])
def test_missing_dataset_is_refused(launcher, preflight, tmp_path):
    with pytest.raises(EnvironmentLacks, match="nothing: expected a directory, found none"):
        preflight(launcher, dataset=tmp_path / "nothing")


@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpi", "spark"])
def test_more_threads_than_cores_are_refused_with_both_numbers(launcher, preflight):
    with pytest.raises(EnvironmentLacks, match="need 9 cores on a node, there are 8"):
        preflight(launcher, ranks=3, threads=3)
    preflight(launcher, ranks=3, threads=3, oversubscribe=True)


@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpi", "spark"])
def test_cores_that_were_to_be_shared_must_be_there(launcher, preflight):
    preflight(launcher, ranks=16, oversubscribe=True, allocated_cores=8)
    with pytest.raises(EnvironmentLacks, match="planned to share 9 cores, there are 8"):
        preflight(launcher, ranks=16, oversubscribe=True, allocated_cores=9)


def test_mpi_of_another_kind_is_refused(preflight, monkeypatch):
    monkeypatch.setattr(mpi, "mpi_mismatch", lambda _tool: "each would think it is alone")
    with pytest.raises(EnvironmentLacks, match="alone"):
        preflight("mpi")


@pytest.mark.parametrize("key", ["spark.excludeOnFailure.enabled", "spark.blacklist.enabled"])
def test_exclusion_of_executors_is_refused_where_no_task_may_fail(key):
    with pytest.raises(EnvironmentLacks, match=r"excludeOnFailure\.enabled is true"):
        check_conf({key: "true", "spark.task.maxFailures": "1"})
    check_conf({key: "true", "spark.task.maxFailures": "4"})
    check_conf({key: "false", "spark.task.maxFailures": "1"})
    both = {"spark.excludeOnFailure.enabled": "false", "spark.blacklist.enabled": "true"}
    check_conf({**both, "spark.task.maxFailures": "1"})


def test_dynamic_allocation_is_refused(preflight):
    settings = {"conf": {"spark.dynamicAllocation.enabled": "True"}}
    with pytest.raises(EnvironmentLacks, match="dynamicAllocation"):
        preflight("spark", launcher_options=settings)


@pytest.mark.parametrize(
    ("master", "fits"),
    [("local[2]", True), ("local[*]", True), ("local[1]", False), ("local", False),
     ("local[1,4]", False), ("local[2,4]", True)],
)  # fmt: skip
def test_local_master_must_have_the_slots(master, fits, preflight):
    refused = pytest.raises(EnvironmentLacks, match=r"1 slot\(s\), 2 barrier tasks")
    with nullcontext() if fits else refused:
        preflight("spark", ranks=2, launcher_options={"master": master})


def test_hostfile_slots_are_read_as_open_mpi_and_mpich_read_them():
    text = "# comment\nnode1 slots=4\nnode2 max_slots=3  # more\n\nnode3\nnode1 slots=2\n"
    assert hostfile_slots(text) == {"node1": 6, "node2": 3, "node3": 1}
    assert hostfile_slots("node1:4\nnode2\n") == {"node1": 4, "node2": 1}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("one slots=4\n", "at least 2 nodes, found 1"), ("one slots=2\ntwo\n", "1 of its hosts")],
)
def test_hostfile_with_too_little_room_is_refused(text, complaint, preflight, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text)
    with pytest.raises(EnvironmentLacks, match=complaint):
        preflight("mpi", nodes=2, interface="eth0", launcher_options={"hostfile": str(hostfile)})


@pytest.mark.parametrize("mpirun_of", [OpenMpi5(), OpenMpi4()])
def test_shared_memory_must_hold_the_segments_of_all_ranks(mpirun_of, preflight, monkeypatch):
    monkeypatch.setattr(mpi, "find_mpirun", lambda _asked: mpirun("/opt/bin/mpirun", mpirun_of))
    monkeypatch.setattr(mpi.shutil, "disk_usage", lambda _path: SimpleNamespace(free=64 * 2**20))
    preflight("mpi", ranks=3)
    preflight("mpi", ranks=4, launcher_options={"arguments": ["--mca", "btl", "self,tcp"]})
    needs_more = pytest.raises(EnvironmentLacks, match=r"each of 4 ranks, 64 MiB are free; give")
    with needs_more if isinstance(mpirun_of, OpenMpi5) else nullcontext():
        preflight("mpi", ranks=4)


def test_nodes_of_a_slurm_allocation_need_srun(preflight, monkeypatch, tmp_path):
    several = {"nodes": 2, "interface": "eth0"}
    monkeypatch.setenv("PATH", str(tmp_path))
    preflight("mpi", **several)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(EnvironmentLacks, match=r"inside a Slurm allocation .* expected srun"):
        preflight("mpi", **several)
    preflight("mpi")  # daemons are on other nodes only
    by_ssh = {"arguments": ["--prtemca", "plm", "ssh"]}
    preflight("mpi", **several, launcher_options=by_ssh)
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    preflight("mpi", **several)


def test_missing_hostfile_is_refused(preflight):
    with pytest.raises(EnvironmentLacks, match="/no/such"):
        preflight("mpi", nodes=2, interface="eth0", launcher_options={"hostfile": "/no/such"})


@pytest.mark.parametrize(
    ("launcher", "log", "rank"),
    [
        ("local", "paceline: rank 3 of 4 failed: DataError: bad\n", None),
        ("mpi", "nothing of the kind", None),
        ("mpi", "prterun noticed that process rank 1 with PID 27653 on node vm exited on", 1),
        ("mpi", "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD", 2),
        ("mpi", "  Process name: [prterun-vm-1234@1,5]\n  Exit code:    3", 5),
        ("torchrun", "Root Cause (first observed failure):\n[0]:\n  time : x\n  rank    : 1 (", 1),
        ("spark", "Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.", 1),
    ],
)  # fmt: skip
def test_failed_rank_is_read_from_the_launchers_words(launcher, log, rank):
    assert launcher_for(launcher).failed_rank(log) == rank


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_shared_memory_of_a_script_that_imports_mpi4py_is_removed_with_the_trial(started, launcher):
    variables = started(launcher).temporary(TemporaryFolders(Path("/tmp/x"), Path("/dev/shm/x")))
    assert variables["OMPI_MCA_btl_sm_backing_directory"] == "/dev/shm/x"
