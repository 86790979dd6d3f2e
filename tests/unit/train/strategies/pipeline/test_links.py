"""Pinning of slots; for transfers see test_stage.py and test_on_mock_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.train.strategies.pipeline import links

GPU = torch.device("cuda", 0)


class Slots:
    def slot(self, index):
        return np.zeros(64, dtype=np.uint8)


@pytest.mark.parametrize("code", [0, 712])
def test_error_of_slots_that_cannot_be_pinned_is_taken_from_cuda(monkeypatch, code):
    """CUDA keeps it, and torch would raise it after the next kernel."""
    raised = []

    def ones(_size, device):
        raised.append(device)
        raise RuntimeError("CUDA error: resource already mapped")

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: code, cudaError=SimpleNamespace(success=0)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", ones)
    links._pin(Slots(), 2, GPU)
    assert raised == ([GPU] if code else [])
