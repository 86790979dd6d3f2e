"""Descriptor of workload `east`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class East(WorkloadDescriptor):
    """Text detection with a branched network, from one of the papers (pipelines and placement)."""

    name = "east"
    summary = "EAST, a branched network, on 128 images of 128x128 pixels with text boxes"
    position = 70
    implementation = "paceline.workloads.east.task:East"
    model = "east"
    own_samples = True
    fields = ("image", "boxes")
    samples = 128
    image_size = 128
    global_batch = 8
    learning_rate = 0.003
