"""Descriptor of workload `resnet101`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class ResNet101(WorkloadDescriptor):
    """A deep residual network on images of 64x64 pixels, as ImageNet-64."""

    name = "resnet101"
    summary = "ResNet-101 on 512 images of 64x64 pixels; option depth: 26, 50, 101 or 152"
    position = 50
    implementation = "paceline.workloads.resnet101.task:ResNet"
    model = "resnet101"
    samples = 512
    image_size = 64
    global_batch = 32
    learning_rate = 0.01
    shorter_side = (120, 200)
