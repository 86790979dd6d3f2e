from __future__ import annotations

from paceline.cli.findings import print_batch_findings
from paceline.tune.batch import BatchFinding, Probe

MIB = 2**20


def test_table_shows_memory_speed_and_what_does_not_fit(capsys):
    found = BatchFinding(
        workload="tiny",
        configuration="tiny.local.none.sequential.n1r1t1.fp32",
        largest_batch=188,
        limited_by="memory",
        probes=[
            Probe(global_batch=188, private_bytes=[2258 * MIB], samples_per_s=25.1),
            Probe(global_batch=222, fits=False, reason="too much"),
        ],
    )
    print_batch_findings([found])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "tiny.local.none.sequential.n1r1t1.fp32: at most 188, limited by memory"
    assert rows[0].split() == ["188", "2258", "MiB", "25.1"]
    assert rows[1].split() == ["222", "does", "not", "fit"]
    assert max(map(len, rows)) <= 80
