"""A /sys/devices/system of a machine that is not here."""

from __future__ import annotations


def listed(numbers):
    return ",".join(map(str, numbers)) + "\n"


def fabricate_system(root, nodes, packages=None):
    """nodes: for each NUMA node its physical cores, each as the numbers of its hardware threads."""
    for node, cores in enumerate(nodes):
        folder = root / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(listed(thread for core in cores for thread in core))
        for core in cores:
            for thread in core:
                topology = root / "cpu" / f"cpu{thread}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(listed(core))
                package = node if packages is None else packages[node]
                (topology / "physical_package_id").write_text(f"{package}\n")
    return root


def two_sockets(root, cores=4, threads=2):
    """Numbered as Linux does: all first threads of node 0, of node 1, then all second ones."""
    total = 2 * cores
    return fabricate_system(
        root,
        [
            [
                tuple(node * cores + core + level * total for level in range(threads))
                for core in range(cores)
            ]
            for node in range(2)
        ],
    )
