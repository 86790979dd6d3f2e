"""The observer of `paceline verify` in one process."""

from __future__ import annotations

import pytest
import torch
from tests.support.trials import rank_context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.analysis.equivalence.observed import judge
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import document
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.own_steps import Observed
from paceline.plan.trials.trial import Observation
from paceline.train.rank.script.batches import checksums
from paceline.train.rank.script.observer import Observer, per_sample
from paceline.train.rank.script.tensors import Checksums, DividedPart, parts_of


def observed(folder, train, *, rank=0, reference=None, rounded=False):
    """Run a training under an observer, as the trial that its folder is named after."""
    files = TrialFiles(folder)
    own = files.rank(rank)
    own.root.mkdir(parents=True)
    observation = Observation(reference=reference, rounded=rounded, steps=100)
    context = rank_context(rank, ranks=2)
    observer = Observer(observation, context, files, own, Recorder(lambda _: None), Checksums())
    with observer.observing():
        train()
    found = document(own.observed, Observed)
    assert found is not None
    return found


class Divided(nn.Module):
    """Two layers, of which a rank has a part of the numbers between them; parts: of all."""

    def __init__(self, part=0, parts=1):
        super().__init__()
        up, down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.up = nn.Parameter(up.weight.detach().chunk(parts, 0)[part].clone())
        self.shift = nn.Parameter(torch.zeros(6 // parts))
        self.down = nn.Parameter(down.weight.detach().chunk(parts, 1)[part].clone())

    def forward(self, inputs):
        hidden = nn.functional.linear(inputs, self.up, self.shift)
        return nn.functional.linear(hidden, self.down)


def of_part(part=0, parts=1, scale=1.0):
    """A training of a part, whose gradients are those of the whole, as the model is linear."""

    def train():
        torch.manual_seed(2)
        model = Divided(part, parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in torch.randn(2, 8, 4):
            optimizer.zero_grad()
            (scale * model(rows)).sum().backward()
            optimizer.step()

    return train


def training(steps=2, scale=1.0, share=slice(None)):
    """A training of a small network; share: of the samples of each step."""

    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs, labels = torch.randn(8 * steps, 4), torch.randint(0, 2, (8 * steps,))
        for step in range(steps):
            rows = slice(8 * step, 8 * step + 8)
            data = TensorDataset(inputs[rows][share], labels[rows][share])
            for samples, targets in DataLoader(data, batch_size=len(data)):
                optimizer.zero_grad()
                (scale * nn.functional.cross_entropy(model(samples), targets)).backward()
                optimizer.step()

    return train


def test_the_reference_describes_itself(tmp_path):
    found = observed(tmp_path / "reference", training())
    assert [each.name for each in found.initial] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [(update.step, update.optimizer) for update in found.updates] == [(0, 0), (1, 0)]
    for update in found.updates:
        assert len(set(update.samples)) == 8
        assert len(update.losses) == 1
        for each in (*update.gradient, *update.change):
            assert each.difference_l2 == 0
            assert each.factor == pytest.approx(1)
    assert [call.name for call in found.calls] == 2 * ["0", "1", "2"]
    assert found.calls[0].samples == found.updates[0].samples


def test_another_trial_is_compared_with_it_tensor_by_tensor(tmp_path):
    observed(tmp_path / "reference", training())
    found = observed(tmp_path / "other", training(scale=1.25), reference="reference")
    assert all(each.difference_l2 == 0 for each in found.initial)
    assert [each.factor for each in found.updates[0].gradient] == pytest.approx(4 * [1.25])
    assert [each.factor for each in found.updates[0].change] == pytest.approx(4 * [1.25], rel=1e-4)
    assert not found.unknown


def test_nothing_is_compared_behind_a_step_that_no_limit_allows(tmp_path):
    whole = observed(tmp_path / "reference", training())
    found = observed(tmp_path / "other", training(scale=2.0), reference="reference")
    first, second = found.updates
    assert [each.factor for each in first.gradient] == pytest.approx(4 * [2.0])
    assert [each.factor for each in first.change] == pytest.approx(4 * [2.0], rel=1e-4)
    assert not any([second.gradient, second.weights, second.change])
    assert {each.step for each in found.calls} == {0}
    assert [each.samples for each in found.updates] == [each.samples for each in whole.updates]
    finding = judge([whole], [], [found])
    assert (finding.passed, finding.step) == (False, 0)
    assert finding.factor == pytest.approx(2.0)


def test_rounding_changes_little_but_something(tmp_path):
    observed(tmp_path / "reference", training())
    found = observed(tmp_path / "rounded", training(), reference="reference", rounded=True)
    for update in found.updates:
        relative = [each.difference_l2 / each.l2 for each in update.gradient if each.l2]
        assert 0 < max(relative) < 1e-3


def test_a_share_has_checksums_of_the_same_samples(tmp_path):
    whole = observed(tmp_path / "reference", training())
    half = observed(tmp_path / "half", training(share=slice(4, 8)), rank=1, reference="reference")
    assert half.updates[0].samples == whole.updates[0].samples[4:]
    by_sample = dict(zip(whole.calls[0].samples, whole.calls[0].forward, strict=True))
    for sample, numbers in zip(half.calls[0].samples, half.calls[0].forward, strict=True):
        assert numbers == pytest.approx(by_sample[sample], rel=1e-5)


def test_calls_with_parts_of_a_batch_have_the_samples_of_these_parts(tmp_path):
    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
        for samples, targets in DataLoader(data, batch_size=8):
            for part, target in zip(samples.split(4), targets.split(4), strict=True):
                hidden = model[0](part)
                (model[1](hidden) - target).square().mean().backward()
            optimizer.step()

    found = observed(tmp_path / "reference", train)
    [step] = found.updates
    assert not step.has_unknown_rows
    assert [(call.name, call.samples) for call in found.calls] == [
        ("0", step.samples[:4]), ("1", step.samples[:4]),
        ("0", step.samples[4:]), ("1", step.samples[4:]),
    ]  # fmt: skip
    assert len(step.inputs) == 4
    assert step.inputs[0] == pytest.approx(step.inputs[0][:4])


def test_weights_that_something_moves_between_steps_are_compared(tmp_path):
    def training_with(between):
        def train():
            torch.manual_seed(1)
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in torch.randn(2, 8, 4):
                before = model.bias.detach().clone()
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
                between(model, before)

        return train

    def restore(model, before):
        model.bias.data.copy_(before)

    whole = observed(tmp_path / "reference", training_with(lambda *_: None))
    assert [each.begin for each in whole.updates] == [[], []]
    other = observed(tmp_path / "other", training_with(restore), reference="reference")
    assert other.updates[0].begin == []
    [lost] = other.updates[1].begin
    [change] = [each for each in whole.updates[0].change if each.name == "bias"]
    assert (lost.name, lost.difference_l2) == ("bias", pytest.approx(change.l2, rel=1e-4))


def test_tied_weights_and_two_optimisers_are_followed(tmp_path):
    def train():
        torch.manual_seed(1)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        optimizers = [torch.optim.SGD(first.parameters()), torch.optim.SGD([second.bias])]
        second(first(torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    found = observed(tmp_path / "reference", train)
    assert found.tied == [["Linear.weight", "Linear2.weight"]]
    assert [update.optimizer for update in found.updates] == [0, 1]
    assert [each.name for each in found.updates[1].gradient] == ["Linear2.bias"]
    again = observed(tmp_path / "again", train, reference="reference")
    assert not again.unknown
    assert {each.name: each.difference_l2 for each in again.initial} == {
        "Linear.weight": 0, "Linear.bias": 0, "Linear2.bias": 0,
    }  # fmt: skip


def test_a_script_that_fails_leaves_what_was_seen(tmp_path):
    def train():
        training(steps=1)()
        raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        observed(tmp_path / "reference", train)
    found = document(TrialFiles(tmp_path / "reference").rank(0).observed, Observed)
    assert len(found.updates) == 1


def test_samples_of_nested_batches_have_checksums():
    batch = {"ids": torch.tensor([[1, 2], [3, 4]]), "label": [torch.tensor([5, 6])]}
    first, second = checksums(batch) or ("", "")
    assert first != second
    assert checksums({"ids": torch.tensor([[3, 4]]), "label": [torch.tensor([6])]}) == [second]
    assert checksums("no tensor") is None


def test_numbers_of_samples_are_norms_and_projections():
    norms = per_sample(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 2) or []
    assert norms[0][0] == pytest.approx(5)
    assert norms[1] == [0, 0]
    assert per_sample(torch.ones(3, 2), 2) is None


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(("kind", "size"), [(torch.float32, 1e-9), (torch.bfloat16, 1e-2)])
def test_what_moves_elements_whose_gradient_is_nothing_but_roundings_is_known(
    tmp_path, optimiser, kind, size
):
    def train(rounding):
        torch.manual_seed(1)
        nn.Linear(2, 1, dtype=kind)(torch.ones(1, 2, dtype=kind))
        weight = nn.Parameter(torch.zeros(4))
        steps = optimiser([weight], lr=0.1)
        weight.grad = torch.tensor([1.0, -2.0, rounding, 0.0])
        steps.step()

    observed(tmp_path / "reference", lambda: train(2 * size))
    found = observed(tmp_path / "other", lambda: train(-size), reference="reference")
    [change] = found.updates[0].change
    assert change.noise_l2 == pytest.approx(change.difference_l2)
    assert (change.noise_l2 > 0.01) == (optimiser is torch.optim.Adam)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_of_a_tensor_is_compared_with_that_part(tmp_path, part):
    whole = observed(tmp_path / "reference", of_part())
    own = observed(tmp_path / "own", of_part(part, 2), rank=part, reference="reference")
    assert not own.unknown
    assert [(each.name, each.start, each.end, each.size) for each in own.parts] == [
        (name, 3 * part, 3 * part + 3, 6) for name in ("down", "shift", "up")
    ]
    assert [each.name for each in own.initial] == ["up", "shift", "down"]
    for update in own.updates:
        assert [each.difference_l2 for each in update.gradient] == pytest.approx(3 * [0], abs=1e-5)
        assert all(each.crc32 is None for each in update.gradient)
    alone = judge([whole], [], [own])
    assert alone.reason == (
        f"ranks have parts of down, and none has its place {0 if part else 3} of 6, which nobody "
        "steps"
    )
    (rest,) = [
        observed(tmp_path / f"rest-{n}", of_part(n, 2), rank=n, reference="reference")
        for n in (0, 1)
        if n != part
    ]
    assert judge([whole], [], [own, rest]).passed is True
    other = observed(tmp_path / "other", of_part(part, 2, 1.5), rank=part, reference="reference")
    assert judge([whole], [], [other, rest]).passed is False


def test_parts_are_known_by_their_values():
    wholes = {
        "a": torch.arange(12.0).reshape(4, 3),
        "zeros": torch.zeros(4),
        "others": torch.ones(4),
        "uneven": torch.ones(5),
    }
    halves = {"a": wholes["a"][2:], "zeros": torch.zeros(2), "others": torch.zeros(2)}
    second = DividedPart(0, 2, 2, 4)
    assert parts_of({**halves, "uneven": torch.zeros(2)}, wholes, 4) == {
        "a": second,
        "zeros": second,
    }
    assert torch.equal(second.of(wholes["a"]), halves["a"])
    assert parts_of({"zeros": torch.zeros(2)}, wholes, 4) == {}  # of either rank
    assert parts_of({"a": wholes["a"]}, wholes, 4) == {}
    fused = torch.arange(24.0).reshape(8, 3)  # two layers, of each of which a rank has a half
    assert parts_of({"a": wholes["a"][3:]}, wholes, 4) == {
        "a": DividedPart(0, 3, 1, 4)
    }  # the last, smaller one
    own = torch.cat([fused[2:4], fused[6:8]])
    [part] = parts_of({"fused": own}, {"fused": fused}, 2).values()
    assert part == DividedPart(0, 2, 2, 4, 2)
    assert torch.equal(part.of(fused), own)
    assert parts_of({"a": wholes["a"][:2, :1]}, wholes, 4) == {}
    assert parts_of({"many": torch.ones(1)}, {"many": torch.ones(100)}, 2) == {}
