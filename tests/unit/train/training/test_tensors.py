from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.train.training import tensors as module
from paceline.train.training.tensors import save_tensors, sha256_of, update_l2


def test_checksum_sees_values_names_and_order_but_not_the_memory_format():
    one, two = torch.arange(24.0).view(1, 2, 3, 4), torch.ones(2)
    first = sha256_of({"a": one, "b": two})
    assert sha256_of({"a": one.to(memory_format=torch.channels_last), "b": two}) == first
    changed = one.clone()
    changed[0, 0, 0, 0] += 1e-6
    others = [{"a": changed, "b": two}, {"b": two, "a": one}, {"a": one, "c": two}]
    assert first not in {sha256_of(other) for other in others}


def test_saved_tensors_come_back_and_no_part_is_left(tmp_path):
    path = tmp_path / "new" / "t.safetensors"
    tensor = torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)
    save_tensors(path, {"x": tensor})
    assert torch.equal(load_file(path)["x"], tensor)
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]


def test_update_is_measured_for_each_tensor():
    initial = {"w": torch.zeros(2), "b": torch.ones(1)}
    final = {"w": torch.tensor([3.0, 4.0]), "b": torch.ones(1)}
    assert update_l2(final, initial) == pytest.approx({"w": 5.0, "b": 0.0})


def test_tied_weights_are_saved_under_both_names(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    save_tensors(tmp_path / "w.safetensors", {"a": weight, "b": weight, "n": torch.tensor(3)})
    found = load_file(tmp_path / "w.safetensors")
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)
    assert found["n"].item() == 3


def test_a_full_disk_is_an_error_of_the_operating_system(tmp_path, monkeypatch):
    def save_file(_tensors, _path):
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr(module, "save_file", save_file)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_tensors(tmp_path / "w.safetensors", {"a": torch.ones(2)})
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "w.safetensors"))
