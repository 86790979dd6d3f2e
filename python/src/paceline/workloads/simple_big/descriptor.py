"""Descriptor of workload `simple-big`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class SimpleBig(WorkloadDescriptor):
    """A small model and many images.

    From the same paper as `complex-small`, sections 3.1 and 3.2; the batch size is ours.
    """

    name = "simple-big"
    summary = "AlexNet on 6,003 images of 224x224 pixels"
    position = 20
    implementation = "paceline.workloads.simple_big.task:AlexNet"
    model = "alexnet"
    needs_facts = False
    samples = 6003
    image_size = 224
    global_batch = 64
    shorter_side = (480, 864)
