"""Trainings that do not continue as if they had never stopped.

torchrun --nproc-per-node 2 resume.py --bug samples [--fixed] [--resume [last.pt]]

They write last.pt every four steps, and previous.pt has the checkpoint before it.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from utils import BATCH, CLASSES, FEATURES, rank, ranks, table

BUGS = (
    *("samples", "epoch", "schedule", "moments", "generator", "scaler", "weights"),
    *("averages", "generator-of-rank-0", "schedule-ahead", "first-step", "samples-of-rank-1"),
    *("loaded-by-rank-0", "decay-schedule"),
)
LAST, PREVIOUS = Path("last.pt"), Path("previous.pt")
RATE = 0.01


class Training:
    """A training. case: what it has; wrong: and loses when it continues."""

    def __init__(self, case, *, wrong):
        self.case, self.lost = case, case if wrong else ""
        norm = nn.BatchNorm1d(16) if case == "averages" else nn.Identity()
        dropout = nn.Dropout(0.3 if case.startswith("generator") else 0.0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 16), norm, nn.ReLU(), dropout, nn.Linear(16, CLASSES)
        )
        self.averages = None
        if case == "averages":
            self.averages = copy.deepcopy(self.model).requires_grad_(False)
        self.net = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 24)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**6, growth_interval=3, enabled=case == "scaler"
        )
        self.step = 0
        self.decays = 0  # steps of the schedule of the weight decay
        self.is_resumed = False
        self.generator = None

    def generators(self):
        of_rank_0 = self.is_resumed and self.lost == "generator-of-rank-0"
        return Path(f"generator-{0 if of_rank_0 else rank()}.pt")

    def save(self):
        torch.save(torch.get_rng_state(), self.generators())
        if rank():
            return
        if LAST.exists():
            LAST.replace(PREVIOUS)
        state = {
            "model": self.model.state_dict(),
            "averages": self.averages and self.averages.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
        }
        torch.save(state, LAST)

    def load(self, checkpoint):
        state = torch.load(checkpoint)
        weights = torch.load(PREVIOUS) if self.lost == "weights" else state
        if self.lost != "loaded-by-rank-0" or rank() == 0:
            self.model.load_state_dict(weights["model"])
        if self.lost != "moments":
            self.optimizer.load_state_dict(state["optimizer"])
        if self.lost == "first-step":  # of Adam's correction
            for each in self.optimizer.state.values():
                each["step"].zero_()
        if self.lost != "schedule":
            self.schedule.load_state_dict(state["schedule"])
        rates = [RATE] if self.lost == "schedule" else self.schedule.get_last_lr()
        for group, value in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = value
        if self.lost != "scaler":
            self.scaler.load_state_dict(state["scaler"])
        if self.averages is not None and self.lost != "averages":
            self.averages.load_state_dict(state["averages"])
        if self.lost == "schedule-ahead":
            self.schedule.step()
        self.is_resumed = True
        if self.lost != "generator":
            self.generator = torch.load(self.generators())
        self.step = state["step"]
        if self.lost != "decay-schedule":
            self.decays = self.step

    def run(self, dataset, steps, every):
        sampler = DistributedSampler(dataset, seed=7)
        loader = DataLoader(dataset, batch_size=BATCH // ranks(), sampler=sampler)
        restarts = self.lost == "samples" or (self.lost == "samples-of-rank-1" and rank() == 1)
        skipped = 0 if restarts else self.step % len(loader)
        for epoch in range(self.step // len(loader), steps):
            if not (self.is_resumed and self.lost == "epoch"):
                sampler.set_epoch(epoch)
            for number, (inputs, labels) in enumerate(loader):
                if self.step == steps:
                    return
                if number >= skipped:
                    self.train(inputs, labels)
                    if self.step % every == 0:
                        self.save()
            skipped = 0

    def train(self, inputs, labels):
        if self.generator is not None:  # a new DataLoader has drawn from it
            torch.set_rng_state(self.generator)
            self.generator = None
        if self.case == "decay-schedule":
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1 * self.decays
            self.decays += 1
        self.optimizer.zero_grad()
        loss = cross_entropy(self.net(inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        if self.averages is not None:
            with torch.no_grad():
                pairs = zip(self.averages.parameters(), self.model.parameters(), strict=True)
                for mean, own in pairs:
                    mean.lerp_(own, 0.1)
        self.step += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", choices=BUGS, required=True)
    parser.add_argument("--fixed", nargs="?", const="yes", default="no", choices=("no", "yes"))
    parser.add_argument("--resume", type=Path, nargs="?", const=LAST)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    dataset = table()
    training = Training(options.bug, wrong=options.fixed == "no")
    torch.manual_seed(100 + rank())
    if options.resume:
        training.load(options.resume)
    training.run(dataset, options.steps, options.every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
