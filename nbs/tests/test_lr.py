"""A requested learning rate is the one in force at the very next step, under every schedule and every optimizer."""
import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from medlab.core import UserError, generator
from medlab.train.knobs import SCHEDULES
from medlab.train.recipe import Recipe
from medlab.train.schedule import from_torch
from medlab.train.trainer import Trainer

S = torch.optim.lr_scheduler
TORCH = dict(step=lambda o: S.StepLR(o, 5, 0.5), exponential=lambda o: S.ExponentialLR(o, 0.9), cosine=lambda o: S.CosineAnnealingLR(o, 30),
    restarts=lambda o: S.CosineAnnealingWarmRestarts(o, 7), cycle=lambda o: S.OneCycleLR(o, max_lr=1.0, total_steps=60), poly=lambda o: S.PolynomialLR(o, 30))
SHAPES = {k: from_torch(s, 59) for k, s in TORCH.items()}
NO_PLAIN_STEP = {"Optimizer": "the base class", "LBFGS": "needs a closure", "SparseAdam": "needs sparse gradients"}
OPTIMIZERS = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and n not in NO_PLAIN_STEP]


@dataclass
class Dense(Recipe):
    "One matrix without a bias, which every optimizer accepts."
    batch_size: int = 4
    name = "dense"

    def build_model(self): return nn.Linear(4, 3, bias=False)

    def dataset(self):
        x = torch.randn(16, 4, generator=generator(self.seed, "dense"))
        return [dict(x=v, case=f"dense{i}") for i, v in enumerate(x)]

    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - 1).square().mean(1))


def watched(trainer):
    "The rate that the optimizer holds each time it takes a step."
    used, step = [], trainer.optimizer.step
    def look(*args, **kwargs):
        used.append([float(g["lr"]) for g in trainer.optimizer.param_groups])
        return step(*args, **kwargs)
    trainer.optimizer.step = look
    return used


def check(optimizer, schedule, requests, warmup, horizon, folder):
    "Train 24 steps with requests at given steps; what was asked for is what was used."
    shape = SHAPES.get(schedule)
    knobs = dict(warmup=warmup, horizon=horizon, lr=1e-2, save_every=0) | ({} if shape else dict(schedule=schedule))
    with Trainer(Dense(optimizer=optimizer), Path(folder) / "run", threads=1, **knobs) as trainer:
        trainer.rate.shape = shape
        used = watched(trainer)
        changes = {at: trainer.set(at=at, lr=lr, **extra) for at, (lr, extra) in requests.items()}
        trainer.fit(until=24, progress=False)
        recorded = trainer.run.metrics("lr")["lr"].value
    assert len(used) == 24 and all(len(set(groups)) == 1 for groups in used)
    ceiling = 1e-2
    for n in range(1, 25):
        if n in changes:
            ceiling = requests[n][0]
            assert changes[n].state == "applied" and changes[n].verified and changes[n].applied_step == n
            assert used[n - 1][0] == ceiling, f"step {n} used {used[n - 1][0]}, asked for was {ceiling}"
        assert used[n - 1][0] == recorded[n - 1] <= ceiling


requests = st.dictionaries(st.integers(1, 24), st.tuples(st.floats(1e-8, 1.0), st.sampled_from([{}, dict(precision="bf16"), dict(schedule="cosine"), dict(accumulate=2)])), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(OPTIMIZERS), st.sampled_from([*SCHEDULES, *TORCH]), requests, st.integers(0, 10), st.integers(1, 30))
def test_asked_is_used(optimizer, schedule, requests, warmup, horizon):
    with tempfile.TemporaryDirectory() as folder: check(optimizer, schedule, requests, warmup, horizon, folder)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *TORCH])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_common_pairs(optimizer, schedule, tmp_path): check(optimizer, schedule, {1: (2e-3, {}), 9: (5e-4, {}), 10: (3e-3, {}), 24: (1e-5, {})}, 3, 12, tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer, tmp_path): check(optimizer, "restarts", {5: (2e-4, {}), 15: (7e-3, dict(precision="bf16"))}, 2, 6, tmp_path)


@pytest.mark.parametrize("optimizer", NO_PLAIN_STEP)
def test_the_others_are_refused(optimizer, tmp_path):
    with pytest.raises(UserError, match="try AdamW"): Trainer(Dense(optimizer=optimizer), tmp_path / "run")
