"""Descriptors of the built-in workloads: model, data set and training values."""

from __future__ import annotations

from paceline.plan.spec.descriptors import WorkloadDescriptor


class ComplexSmallWorkload(WorkloadDescriptor):
    """A large model and few images.

    Model, number of images, transforms and optimiser are those of Lerat, Mahmoudi, Mahmoudi:
    Distributed Deep Learning, From Single-Node to Multi-Node Architecture (2022), sections 3.1 and
    3.2. The paper gives no batch size; this one is ours.
    """

    name = "complex-small"
    summary = "VGG16 on 791 images of 224x224 pixels"
    position = 10
    implementation = "paceline.train.workloads.convolutional:VGG16"
    model = "vgg16"
    needs_facts = False
    samples = 791
    image_size = 224
    global_batch = 16
    shorter_side = (480, 1080)


class SimpleBigWorkload(WorkloadDescriptor):
    """A small model and many images.

    From the same paper as `complex-small`, sections 3.1 and 3.2; the batch size is ours.
    """

    name = "simple-big"
    summary = "AlexNet on 6,003 images of 224x224 pixels"
    position = 20
    implementation = "paceline.train.workloads.convolutional:AlexNet"
    model = "alexnet"
    needs_facts = False
    samples = 6003
    image_size = 224
    global_batch = 64
    shorter_side = (480, 864)


class TinyWorkload(WorkloadDescriptor):
    """A workload that trains within seconds."""

    name = "tiny"
    summary = "small AlexNet on 96 images of 64x64 pixels, for tests and the quickstart"
    position = 30
    implementation = "paceline.train.workloads.convolutional:TinyAlexNet"
    model = "tiny-alexnet"
    needs_facts = False
    samples = 96
    image_size = 64
    global_batch = 32
    learning_rate = 0.01  # with 0.001 the few steps of a quickstart hardly change the loss
    shorter_side = (120, 200)


class CifarCnnWorkload(WorkloadDescriptor):
    """A small network on images of the size of CIFAR-10; `image_size = 64` is that of
    ImageNet-64."""

    name = "cifar-cnn"
    summary = "small convolutional network on 512 images of 32x32 pixels; or 64x64"
    position = 40
    implementation = "paceline.train.workloads.convolutional:CifarCnn"
    model = "cifar-cnn"
    needs_facts = False
    samples = 512
    image_size = 32
    global_batch = 32
    learning_rate = 0.02
    shorter_side = (120, 200)


class ResNet101Workload(WorkloadDescriptor):
    """A deep residual network on images of 64x64 pixels, as ImageNet-64."""

    name = "resnet101"
    summary = "ResNet-101 on 512 images of 64x64 pixels; option depth: 26, 50, 101 or 152"
    position = 50
    implementation = "paceline.train.workloads.resnet:ResNet"
    model = "resnet101"
    samples = 512
    image_size = 64
    global_batch = 32
    learning_rate = 0.01
    shorter_side = (120, 200)


class DeepLabWorkload(WorkloadDescriptor):
    """Segmentation, from two of the papers: DeepLabV3+ with Horovod on several nodes."""

    name = "deeplab"
    summary = "DeepLabV3+ on 128 images of 64x64 pixels with masks; ResNet, Xception or Swin"
    position = 60
    implementation = "paceline.train.workloads.deeplab:DeepLab"
    model = "deeplabv3plus"
    own_samples = True
    fields = ("image", "mask")
    samples = 128
    image_size = 64
    global_batch = 8
    learning_rate = 0.05


class EastWorkload(WorkloadDescriptor):
    """Text detection with a branched network, from one of the papers (pipelines and placement)."""

    name = "east"
    summary = "EAST, a branched network, on 128 images of 128x128 pixels with text boxes"
    position = 70
    implementation = "paceline.train.workloads.east:East"
    model = "east"
    own_samples = True
    fields = ("image", "boxes")
    samples = 128
    image_size = 128
    global_batch = 8
    learning_rate = 0.003


class GptSmallWorkload(WorkloadDescriptor):
    """A language model in the shape of GPT-2."""

    name = "gpt-small"
    summary = "transformer of 4 blocks on 512 sequences of 64 tokens; options up to GPT-2"
    position = 80
    implementation = "paceline.train.workloads.gpt:GPT"
    model = "gpt"
    own_samples = True
    fields = ("tokens", "tokens")
    samples = 512
    image_size = 32  # not used
    global_batch = 16
    learning_rate = 0.003
