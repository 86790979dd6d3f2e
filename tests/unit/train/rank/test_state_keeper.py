"""States that a rank keeps while it trains, and the steps that it replays from them later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.support.fabricated_samples import ROWS, FakeFeed, opening
from tests.support.trials import changed

from paceline.base.errors import DataError, PacelineWarning
from paceline.measure.records.documents import Checkpoint, CheckpointFolder
from paceline.measure.records.layout import RunFiles
from paceline.train.rank.peers import Peers
from paceline.train.rank.repeated_steps import StepRepeater
from paceline.train.rank.replay import StateKeeper, StepReplay, WeightSample, begin_replay
from paceline.train.training.state import RankState
from paceline.train.training.strategy import GradientResult, LocalStrategy

STEPS = 100


class Stub(LocalStrategy):
    def prepare(self, task, model, context, trial, peers):
        pass

    def gradient(self, batch):
        return GradientResult(
            loss_sum=1.0, forward_s=0.0, backward_s=0.0, comm_s=0.0, comm_ready_unix_s=None
        )

    def gradients(self):
        return {"w": torch.ones(2)}

    def step(self):
        pass

    def state_dict(self):
        return {}

    def close(self, *, failed):
        pass


class Counting(Stub):
    """Its only weight is the number of its steps."""

    def __init__(self):
        self.weight, self.rate, self.is_damaged = torch.zeros(2), 0.1, False

    def step(self):
        self.weight += 1

    def state_dict(self):
        return {"w": self.weight}

    def rank_state(self):
        state = RankState()
        state.add_whole("weights/w", self.weight)
        state.add_whole("optimizer/w", torch.zeros(3))
        state.values["rates/0.w"] = self.rate
        return state

    def restore(self, saved):
        if self.is_damaged:
            raise DataError("no such tensor")
        self.weight.fill_(saved.checkpoint.steps)


@pytest.fixture
def repeater_of(make_trial, solo, tmp_path):
    """Makes the repeater of a trial in one run directory."""

    def make(strategy, name="base", **values):
        trial = changed(make_trial(epochs=100, max_steps=STEPS), id=name, **values)
        with opening(ROWS, FakeFeed)(trial.training, None, None) as samples:
            pass
        return StepRepeater(
            trial, solo, RunFiles(tmp_path).trial(name), samples, strategy,
            Peers(solo, trial, store=None), lambda samples, _purpose: FakeFeed(samples.order),
        )  # fmt: skip

    return make


def train(keeper, strategy):
    """Train all steps; return those after which time was taken."""
    took_time = []
    for done in range(1, STEPS + 1):
        strategy.step()
        if keeper.after_step(done):
            took_time.append(done)
    return took_time


def kept(files):
    found = (CheckpointFolder(folder).complete() for folder in RunFiles(files).replay.iterdir())
    return sorted(checkpoint.steps for each in found for checkpoint in each)


def test_steps_that_change_no_seen_weight_are_noted():
    strategy = Counting()
    sample = WeightSample(strategy, "cpu")
    for done in (1, 2, 3, 4):
        if done != 3:
            strategy.step()
        sample.after_step(done)
    assert sample.unchanged_after == [3]


def test_weights_on_a_device_are_not_seen():
    sample = WeightSample(Counting(), "cuda")
    sample.after_step(1)
    assert sample.unchanged_after is None


def test_baseline_keeps_its_states_and_its_early_weights(repeater_of, tmp_path):
    strategy = Counting()
    repeater = repeater_of(strategy)
    keeper = StateKeeper(repeater)
    assert not repeater.files.replay(keeper._sha256).exists(), "only begin() writes"
    assert keeper.begin()
    assert kept(tmp_path) == [0]
    assert train(keeper, strategy) == [16, 50, 98]
    assert kept(tmp_path) == [0, 50, 98]
    assert load_file(repeater.files.weights_at("step16"))["w"].tolist() == [16, 16]
    assert keeper.unchanged_after == []


def test_repeat_of_a_baseline_keeps_no_state_again(repeater_of):
    strategy = Counting()
    keeper = StateKeeper(repeater_of(strategy))
    keeper.begin()
    train(keeper, strategy)
    files = {path: path.stat().st_mtime_ns for path in keeper._folder.root.rglob("*")}
    again = StateKeeper(repeater_of(Counting(), name="again"))
    assert not again.begin()
    train(again, again._strategy)
    assert files == {path: path.stat().st_mtime_ns for path in keeper._folder.root.rglob("*")}


def test_state_that_cannot_be_written_is_a_warning(repeater_of):
    keeper = StateKeeper(repeater_of(Counting()))
    keeper._folder.root.parent.mkdir(parents=True)
    keeper._folder.root.write_text("a file in place of the folder")
    with pytest.warns(PacelineWarning, match="no state after 0 steps: .*the training goes on"):
        keeper.begin()


def test_state_is_restored_with_the_learning_rates_compared(repeater_of):
    strategy = Counting()
    keeper = StateKeeper(repeater_of(strategy))
    keeper.begin()
    train(keeper, strategy)
    state = keeper.state_after(50)
    assert isinstance(state, Checkpoint)
    assert keeper.restore(state) is None
    assert strategy.weight.tolist() == [50, 50]

    other = Counting()
    other.rate = 0.2
    keeper = StateKeeper(repeater_of(other, name="other"))
    train(keeper, other)
    assert keeper.restore(state) == ("after 50 steps 0.w had learning rate 0.2, the baseline's 0.1")
    other.is_damaged = True
    assert keeper.restore(state) == "no such tensor"


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (Counting(), "the baseline's state after 50 steps does not exist"),
        (Stub(), "local strategy sequential cannot train from a given step"),
    ],
)
def test_missing_state_has_a_reason(repeater_of, strategy, reason):
    keeper = StateKeeper(repeater_of(strategy))
    assert reason in keeper.state_after(50)


def test_replay_trains_from_each_state_and_saves_gradient_and_weights(repeater_of):
    strategy = Counting()
    repeater = repeater_of(strategy)
    keeper, replay = begin_replay(repeater)
    train(keeper, strategy)
    replay._probe = SimpleNamespace(noise={"bias"}, replayed=lambda first, *_: first / 1000)
    repeater.__dict__["first_weights"] = {"w": torch.zeros(2)}
    found = replay.run()
    assert found.moved_l2["step16"]["w"] == pytest.approx(16 * 2**0.5)
    assert found.moved_l2["replay50"]["w"] == pytest.approx(2 * 2**0.5)
    assert found.rounding == {"replay50": 0.05, "replay98": 0.098}
    assert found.noise == ["bias"]
    assert load_file(repeater.files.weights_at("replay50"))["w"].tolist() == [52, 52]
    assert load_file(repeater.files.gradient_at("replay98"))["w"].tolist() == [1, 1]


def test_replay_says_what_is_missing_or_wrong(repeater_of):
    base = Counting()
    keeper, _ = begin_replay(repeater_of(base))
    train(keeper, base)
    faults = {50: None, 98: "another rate"}
    other = repeater_of(Counting(), name="other", local_strategy="intraop")
    assert not other.trial.is_baseline
    stub = SimpleNamespace(
        state_after=lambda done: "not kept" if done == 50 else keeper.state_after(done),
        restore=lambda state: faults[state.steps],
    )
    found = StepReplay(other, stub, None).run()
    assert (found.missing, found.faults) == ({"replay50": "not kept"}, {"replay98": "another rate"})
    assert not other.files.weights_at("replay98").exists()
