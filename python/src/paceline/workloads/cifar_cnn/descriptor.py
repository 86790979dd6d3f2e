"""Descriptor of workload `cifar-cnn`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class CifarCnn(WorkloadDescriptor):
    """A small network on images of the size of CIFAR-10; `image_size = 64` is that of
    ImageNet-64."""

    name = "cifar-cnn"
    summary = "small convolutional network on 512 images of 32x32 pixels; or 64x64"
    position = 40
    implementation = "paceline.workloads.cifar_cnn.task:CifarCnn"
    model = "cifar-cnn"
    needs_facts = False
    samples = 512
    image_size = 32
    global_batch = 32
    learning_rate = 0.02
    shorter_side = (120, 200)
