"""Descriptor of workload `tiny`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class Tiny(WorkloadDescriptor):
    """A workload that trains within seconds."""

    name = "tiny"
    summary = "small AlexNet on 96 images of 64x64 pixels, for tests and the quickstart"
    position = 30
    implementation = "paceline.workloads.tiny.task:TinyAlexNet"
    model = "tiny-alexnet"
    needs_facts = False
    samples = 96
    image_size = 64
    global_batch = 32
    learning_rate = 0.01  # with 0.001 the few steps of a quickstart hardly change the loss
    shorter_side = (120, 200)
