"""Descriptor of workload `simple-big`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class SimpleBig(WorkloadDescriptor):
    name = "simple-big"
    summary = "alexnet"
    position = 20
    implementation = "paceline.workloads.build:build_model"
    model = "alexnet"
    samples = 6003
    image_size = 224
    global_batch = 64

    def split_places(self) -> tuple[int, ...]:
        return (2, 3, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18, 19, 21)
