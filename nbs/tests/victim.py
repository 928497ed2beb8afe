"""A training process to be killed: trains a small recipe and says on standard output what it was promised.

    victim.py RUN SEED_OF_PACE     trains for ever from wherever the run stands, acknowledging steps, events and checkpoints
    victim.py RUN --until N        trains to step N and prints the hash of everything that decides how training goes on
"""
import ast
import hashlib
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from medlab.core import generator
from medlab.recipes.base import Recipe
from medlab.train.trainer import Trainer


@dataclass
class Small(Recipe):
    "Dropout, BatchNorm and noise, so that random state and buffers matter."
    batch_size: int = 4
    name = "small"

    def build_model(self): return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.SiLU(), nn.Dropout(0.2), nn.Conv3d(4, 1, 1))

    def dataset(self):
        x = torch.randn(20, 1, 6, 6, 6, generator=generator(self.seed, "small"))
        return [dict(x=v, case=f"small{i:02}") for i, v in enumerate(x)]

    def prepare(self, batch, seed, step): return {**batch, "noisy": batch["x"] + torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(seed))}
    def losses(self, model, batch): return dict(loss=(model(batch["noisy"]) - batch["x"]).square().mean((1, 2, 3, 4)))


KNOBS = dict(lr=3e-3, ema=0.9, gradient_accumulation_steps=2, schedule="restarts", horizon=15)


def open_run(path):
    "A trainer on the run: new, or going on."
    exists = (Path(path) / "run.db").exists()
    return Trainer(Small(), path, resume=exists, threads=1, **({} if exists else KNOBS))


def digest(x):
    "A hash of nested state, to the bit."
    h = hashlib.sha256()
    def add(x):
        if isinstance(x, dict):
            for k in x: h.update(repr(k).encode()); add(x[k])
        elif isinstance(x, (list, tuple)):
            for v in x: add(v)
        else: h.update(x.numpy().tobytes() if torch.is_tensor(x) else repr(x).encode())
    add(x)
    return h.hexdigest()


TALKING = threading.Lock()


def say(*words):
    "A line in one piece, also where Python does not buffer: a kill never leaves half of one."
    with TALKING:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def promise(trainer, seed):
    "Train for ever, printing what is acknowledged as soon as it is; with an even seed nothing but the clock flushes telemetry."
    pace, talks = random.Random(seed), seed % 2
    one = trainer.loop.one

    def step():
        made = one()
        say("step", trainer.iteration, time.monotonic())
        if talks and pace.random() < 0.2: say("event", trainer.event("promise", f"promised at {trainer.iteration}").result())
        time.sleep(pace.random() * 0.004)
        return made

    trainer.loop.one = step
    trainer.saver.saved.append(lambda file: say("checkpoint", file.name))  # from the thread that wrote it
    trainer.set(save_every=7 if talks else 200)
    trainer.fit(until=10**9, progress=False)


if __name__ == "__main__":
    path, *rest = sys.argv[1:]
    trainer = open_run(path)
    if rest[0] == "--until":
        for at, change in ast.literal_eval(rest[2] if len(rest) > 2 else "{}").items():
            if trainer.iteration < at: trainer.set(at=at, **change)
        trainer.fit(until=int(rest[1]), progress=False)
        say(digest(trainer.state.state_dict()))
        trainer.close()
    else: promise(trainer, int(rest[0]))
