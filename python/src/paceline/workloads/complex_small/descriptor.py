"""Descriptor of workload `complex-small`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class ComplexSmall(WorkloadDescriptor):
    """A large model and few images.

    Model, number of images, transforms and optimiser are those of Lerat, Mahmoudi, Mahmoudi:
    Distributed Deep Learning, From Single-Node to Multi-Node Architecture (2022), sections 3.1 and
    3.2. The paper gives no batch size; this one is ours.
    """

    name = "complex-small"
    summary = "VGG16 on 791 images of 224x224 pixels"
    position = 10
    implementation = "paceline.workloads.complex_small.task:VGG16"
    model = "vgg16"
    needs_facts = False
    samples = 791
    image_size = 224
    global_batch = 16
    shorter_side = (480, 1080)
