"""Let all tensors go through a copy on the host, as those of a GPU do where MPI knows no GPUs."""

from __future__ import annotations

import torch

from paceline.collectives import buffers


def copy_everything() -> None:
    """Make transports take the memory of all tensors for that of a GPU."""
    buffers.is_on_host = lambda _: False
    tensor = torch.ones(1)
    assert buffers.wire_buffer(tensor).data_ptr() != tensor.data_ptr()
