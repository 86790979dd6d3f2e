"""Samples of a step, counted where backward passes reach them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from paceline.train.rank.script.batches import (
    BatchCounter,
    checksums,
    places_in,
    rows_of,
    samples_of,
)


@pytest.fixture
def counter():
    made = BatchCounter()
    with made.counting():
        yield made


def rows(count, width=3):
    return torch.randn(count, width)


def loader(samples=12, batch=4):
    return DataLoader([(row, row[0]) for row in rows(samples)], batch_size=batch)


def passed(model, *inputs):
    model(*inputs).square().mean().backward()


def test_a_batch_of_a_loader_counts_when_a_backward_pass_reaches_it(counter):
    model = nn.Linear(3, 1)
    assert [passed(model, x) or counter.take() for x, _ in loader(10)] == [4, 4, 2]
    assert counter.take() is None


def test_accumulated_batches_add_up_and_several_passes_over_one_do_not(counter):
    model, count = nn.Linear(3, 1), 0
    for x, _ in loader(12):
        passed(model, x)
        passed(model, x)
        count += 1
    assert count == 3
    assert counter.take() == 12


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_that_are_fetched_ahead_do_not_count_twice(counter, copies, ahead):
    model, batches = nn.Linear(3, 1), iter(loader(24))
    waiting, counted = [next(batches) for _ in range(ahead)], []
    while waiting:
        waiting += [each for each in [next(batches, None)] if each is not None]
        x, _ = waiting.pop(0)
        passed(model, x.clone() if copies else x)
        counted.append(counter.take())
    assert counted == [4] * 6


def test_what_no_gradient_reaches_does_not_count(counter):
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model(rows(1))  # a dummy
        for x, _ in loader(50, 25):  # an evaluation
            model(x)
    model(rows(7))  # a pass whose output is not used
    counted = []
    for x, _ in loader(8):
        passed(model, x)
        counted.append(counter.take())
        counter.settle()
        with torch.no_grad():
            for held, _ in loader(6, 6):
                model(held)
    assert counted == [4, 4]


def test_equal_first_batches_that_are_trained_on_have_equal_checksums():
    def first_sha256(*inputs):
        counter, model = BatchCounter(), nn.Linear(3, 1)
        with counter.counting(), torch.no_grad():
            model(torch.zeros(1, 3))
            with torch.enable_grad():
                for each in inputs:
                    passed(model, each)
        return counter.first_sha256

    same = rows(4)
    found = [first_sha256(same, rows(2)), first_sha256(same), first_sha256(rows(4))]
    assert found[0] == found[1] != found[2]
    assert first_sha256() is None


def test_without_a_loader_the_inputs_count(counter):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    for number in range(3):
        for _ in range(4):
            passed(model, rows(6))
        assert counter.take() == 24
        if number == 0:
            counter.settle()


def test_losses_transforms_and_recomputed_passes_are_no_passes_of_their_own(counter):
    class Data(Dataset):
        def __init__(self):
            self.scale = nn.BatchNorm1d(3).eval()

        def __len__(self):
            return 8

        def __getitem__(self, i):
            return self.scale(torch.ones(1, 3) * i).detach()[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model, loss = Net(), nn.Linear(1, 1)
    for batch in DataLoader(Data(), batch_size=4):
        loss(model(batch)).sum().backward()
        assert counter.take() == 4


def test_a_discriminator_that_a_generator_feeds_has_no_samples_of_its_own(counter):
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    passed(discriminator, generator(rows(5, 2)))
    assert counter.take() == 5
    for x, _ in loader(8):
        passed(discriminator, x)
        passed(discriminator, generator(rows(4, 2)).detach())
        passed(discriminator, generator(rows(4, 2)))
        assert counter.take() == 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][-1])


class Sums(nn.Module):
    """The first dimension is time, which no layer says."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x.sum(0))


@pytest.mark.parametrize("loads", [False, True])
def test_samples_are_the_second_dimension_where_a_layer_says_so(counter, loads):
    model = Recurrent()
    given = [torch.randn(35, 20, 3) for _ in range(2)]
    for batch in DataLoader(given, batch_size=None) if loads else given:
        passed(model, batch)
        assert counter.take() == 20
        counter.settle()


def test_samples_that_the_output_contradicts_are_not_known(counter):
    passed(Sums(), torch.randn(35, 20, 3))
    assert counter.take() is None
    passed(nn.Linear(3, 1), rows(4))
    assert counter.take() == 4


def test_a_model_that_returns_its_loss_counts_its_inputs(counter):
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, *, x, labels):
            logits = self.net(x)
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    Task()(x=rows(6), labels=rows(6, 1))["loss"].backward()
    assert counter.take() == 6


def test_after_a_forward_pass_that_fails_the_next_step_counts_again(counter):
    model = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(RuntimeError):
        model(rows(2, 5))
    counted = [passed(model, rows(4)) or counter.take() for _ in range(2)]
    assert counted == [None, 4]


def test_images_of_their_own_sizes_are_counted():
    images = tuple(torch.ones(3, 8 + i, 8) for i in range(5))
    assert rows_of((images, tuple({"boxes": torch.ones(i, 4)} for i in range(5)))) == 5
    assert rows_of((images, torch.ones(5))) == 5
    assert rows_of((images[:1], [{}])) == 1
    assert rows_of(images) is None  # or several tensors of 3 samples each
    assert rows_of([[torch.ones(3, 8, 8)] * 2, torch.ones(3)]) == 3  # two views of 3 samples
    assert rows_of([torch.ones(3, 8, 8), torch.ones(3)]) == 3
    assert rows_of({"x": torch.ones(7, 2), "n": 1}) == 7
    assert rows_of("no tensor") is None


def test_samples_in_mappings_of_their_own_are_counted_and_known_apart():
    samples = [{"image": torch.full((3, 8, 8 + i), i), "boxes": torch.ones(i, 4)} for i in (1, 2)]
    assert rows_of(samples) == rows_of((samples,)) == 2
    own = [(checksums([each]) or [""])[0] for each in samples]
    assert checksums(samples) == checksums((samples,)) == own
    assert rows_of([{"ids": torch.ones(length)} for length in (5, 7, 5)]) == 3
    for other in (4, 12):
        batches = [{"x": torch.ones(4, 2), "y": torch.ones(4)}, {"x": torch.ones(other, 3)}]
        assert rows_of(batches) == rows_of(({"x": torch.ones(4, 2)},)) == 4
    images = [torch.full((3, 8 + i, 8), i) for i in (1, 2)]
    boxes = [{"boxes": torch.ones(i, 4)} for i in (1, 2)]
    first, second = checksums((images, boxes)) or ("", "")
    assert first != second
    assert checksums((images[::-1], boxes[::-1])) == [second, first]


def test_samples_are_the_rows_of_tensors_as_long_as_the_first():
    assert len(samples_of({"a": torch.ones(3, 2), "b": [torch.ones(3), torch.ones(7)]})) == 2
    assert samples_of({"n": torch.tensor(3.0), "empty": torch.ones(0)}) == []


def test_models_can_be_copied_and_saved_whole_and_copies_count_nothing(counter, tmp_path):
    model = nn.Linear(3, 1)
    passed(model, rows(4))
    counter.take()
    counter.settle()
    torch.save(model, tmp_path / "model.pt")
    assert b"paceline" not in (tmp_path / "model.pt").read_bytes()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (loaded, copy.deepcopy(model)):
        each(rows(4))
    passed(model, rows(5))
    assert counter.take() == 5


def test_the_samples_of_a_batch_of_graphs_are_graphs_and_not_their_nodes():
    nodes, numbers = torch.tensor([[1], [2], [1], [1], [2]]), torch.tensor([0, 0, 1, 2, 2])
    edges = torch.tensor([[0, 1, 3], [1, 0, 4]])
    assert rows_of((nodes, edges, numbers)) == 3
    found = checksums((nodes, edges, numbers))
    assert found is not None
    first, second, third = found
    assert first == third != second
    assert checksums((nodes, edges)) == []  # nodes that several graphs may have
    tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3, dtype=torch.int64)
    assert len(checksums((tokens, mask)) or ()) == rows_of((tokens, mask)) == 2
    assert len(checksums((nodes, torch.ones(5, dtype=torch.int64))) or ()) == 5


def test_calls_within_a_transform_of_torch_are_left_out(counter):
    model = nn.Linear(3, 1)
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss_of(weights, row):
        return torch.func.functional_call(model, weights, row[None]).square().mean()

    torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, rows(4))
    assert counter.take() is None
    passed(model, rows(4))
    assert counter.take() == 4


def test_rows_of_a_module_are_found_in_the_batch():
    inputs, labels = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    batch = [inputs, labels]
    assert places_in(batch, (inputs[1::2],)) == [1, 3, 5]
    assert places_in(batch, (inputs[:2] + 0.5,)) == []
    assert places_in([torch.zeros(6, 2)], (torch.zeros(2, 2),)) == []  # each row may be any one
    assert places_in(batch, (inputs[:, :1],)) == []
    assert places_in(batch, ()) == []
