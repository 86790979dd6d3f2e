"""Trainings that do not continue as if they had never stopped.

torchrun --nproc-per-node 2 resume.py --bug samples [--fixed] [--resume]

With --resume they continue from last.pt, which they write every four steps.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from utils import CLASSES, FEATURES, table

BUGS = ("samples", "schedule", "moments", "generator", "scaler", "weights")
CHECKPOINT = Path("last.pt")
EVERY = 4


class Training:
    """A training. case: what it has; wrong: and loses when it continues."""

    def __init__(self, case, rank, *, wrong):
        self.lost = case if wrong else ""
        self.rank = rank
        dropout = nn.Dropout(0.3 if case == "generator" else 0.0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.ReLU(), dropout, nn.Linear(16, CLASSES)
        )
        self.net = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 24)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**6, growth_interval=3, enabled=case == "scaler"
        )
        self.generator = None
        self.step = 0

    def generators(self):
        return Path(f"generators-{self.rank}.pt")

    def save(self):
        torch.save(torch.get_rng_state(), self.generators())
        if self.rank:
            return
        if CHECKPOINT.exists():
            CHECKPOINT.replace("previous.pt")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
        }
        torch.save(state, CHECKPOINT)

    def load(self):
        state = torch.load(CHECKPOINT)
        weights = torch.load("previous.pt") if self.lost == "weights" else state
        self.model.load_state_dict(weights["model"])
        if self.lost != "moments":
            self.optimizer.load_state_dict(state["optimizer"])
        if self.lost == "schedule":
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01
        else:
            self.schedule.load_state_dict(state["schedule"])
        if self.lost == "moments":
            for group, rate in zip(
                self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
            ):
                group["lr"] = rate
                group["initial_lr"] = 0.01
        if self.lost != "scaler":
            self.scaler.load_state_dict(state["scaler"])
        if self.lost != "generator":
            self.generator = torch.load(self.generators())
        self.step = state["step"]

    def run(self, dataset, steps=24):
        sampler = DistributedSampler(dataset, seed=7)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        skipped = 0 if self.lost == "samples" else self.step % len(loader)
        for epoch in range(self.step // len(loader), steps):
            sampler.set_epoch(epoch)
            for number, (inputs, labels) in enumerate(loader):
                if number < skipped:
                    continue
                if self.step == steps:
                    return
                self.train(inputs, labels)
            skipped = 0

    def train(self, inputs, labels):
        if self.generator is not None:  # a new DataLoader has drawn from it
            torch.set_rng_state(self.generator)
            self.generator = None
        self.optimizer.zero_grad()
        loss = cross_entropy(self.net(inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.step += 1
        if self.step % EVERY == 0:
            self.save()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", choices=BUGS, required=True)
    parser.add_argument("--fixed", nargs="?", const="yes", default="no", choices=("no", "yes"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    dataset = table()
    training = Training(options.bug, dist.get_rank(), wrong=options.fixed == "no")
    torch.manual_seed(100 + dist.get_rank())
    if options.resume:
        training.load()
    training.run(dataset)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
