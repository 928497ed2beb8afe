"""A recipe that trains in milliseconds, and what tests ask of its runs."""
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from medlab.core import generator
from medlab.recipes.base import Recipe
from medlab.recipes.table import Table
from medlab.run.directory import Run
from medlab.train.trainer import Trainer


@dataclass
class Toy(Recipe):
    "A small regression; BatchNorm and dropout, so that buffers and random state matter."
    batch_size: int = 4
    name = "toy"

    def build_model(self): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def dataset(self):
        x = torch.randn(32, 4, generator=generator(self.seed, "toy"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i:02}") for i, v in enumerate(x)]

    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))
    def evaluate(self, model, cases=None, **options): return Table([dict(case="ones", mse=float(model(torch.ones(2, 4)).square().mean()))])


@dataclass
class Half(Toy):
    "Of the two micro-batches of a step each of two ranks makes one. Without what depends on the batch, so that two are as good as one."
    seconds: float = 0.0  # that a micro-batch takes longer

    def build_model(self): return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))

    def dataset(self):
        x = torch.randn(64, 4, generator=generator(0, "half"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"half{i:02}") for i, v in enumerate(x)]

    def losses(self, model, batch):
        time.sleep(self.seconds)
        return super().losses(model, batch)


def trainer(path, recipe=None, **knobs):
    "A trainer on the CPU."
    return Trainer(recipe or Toy(), path, device="cpu", threads=1, **knobs)


def losses(path, name="loss"):
    "The recorded losses, by step."
    s = Run(path).metrics(name)[name]
    return dict(zip(s.step.tolist(), s.value.tolist()))


def events(path, *kinds):
    "The texts of events of these kinds."
    return [e.text for e in Run(path).events() if e.kind in kinds]


CHILD = """
import sys; sys.path.insert(0, {here!r})
from toys import trainer
from medlab import faults
with trainer({path!r}, **{knobs!r}) as t, faults.plant(t, {plan}): t.fit(until={until}, progress=False)
"""


def child(path, plan, until, **knobs):
    "Train in a process of its own with a fault planted; its exit status and what it wrote to standard error."
    code = CHILD.format(here=str(Path(__file__).parent), path=str(path), plan=plan, until=until, knobs=knobs)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr


def weights(t):
    "Everything the model holds."
    return {k: v.clone() for k, v in t.model.state_dict().items()}


def equal(a, b):
    "Whether two such are the same to the bit."
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
