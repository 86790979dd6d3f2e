"""Descriptor of workload `complex-small`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class ComplexSmall(WorkloadDescriptor):
    name = "complex-small"
    summary = "vgg16"
    position = 10
    implementation = "paceline.workloads.build:build_model"
    model = "vgg16"
    samples = 791
    image_size = 224
    global_batch = 16

    def split_places(self) -> tuple[int, ...]:
        return (
            2, 4, 5, 7, 9, 10, 12, 14, 16, 17, 19, 21, 23, 24, 26, 28, 30, 31, 32, 33, 35, 36, 38,
            39,
        )  # fmt: skip
