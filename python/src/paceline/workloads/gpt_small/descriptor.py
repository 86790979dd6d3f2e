"""Descriptor of workload `gpt-small`."""

from __future__ import annotations

from paceline.spec.descriptors import WorkloadDescriptor


class GptSmall(WorkloadDescriptor):
    """A language model in the shape of GPT-2."""

    name = "gpt-small"
    summary = "transformer of 4 blocks on 512 sequences of 64 tokens; options up to GPT-2"
    position = 80
    implementation = "paceline.workloads.gpt_small.task:GPT"
    model = "gpt"
    own_samples = True
    fields = ("tokens", "tokens")
    samples = 512
    image_size = 32  # not used
    global_batch = 16
    learning_rate = 0.003
