"""Descriptor of workload `tiny`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class Tiny(WorkloadDescriptor):
    name = "tiny"
    summary = "tiny-alexnet"
    position = 30
    implementation = "paceline.workloads.build:build_model"
    model = "tiny-alexnet"
    samples = 96
    image_size = 64
    global_batch = 32
    learning_rate = 0.01  # with 0.001 the few steps of a quickstart hardly change the loss

    def split_places(self) -> tuple[int, ...]:
        return (2, 3, 5, 6, 8, 9, 10, 11, 12, 14, 15, 17)
