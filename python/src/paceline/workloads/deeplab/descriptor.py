"""Descriptor of workload `deeplab`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class DeepLab(WorkloadDescriptor):
    """Segmentation, from two of the papers: DeepLabV3+ with Horovod on several nodes."""

    name = "deeplab"
    summary = "DeepLabV3+ on 128 images of 64x64 pixels with masks; ResNet or Xception"
    position = 60
    implementation = "paceline.workloads.deeplab.task:DeepLab"
    model = "deeplabv3plus"
    own_samples = True
    fields = ("image", "mask")
    samples = 128
    image_size = 64
    global_batch = 8
    learning_rate = 0.05
