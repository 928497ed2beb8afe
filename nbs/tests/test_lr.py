"""Every schedule × every optimizer × any changes: the requested learning rate is the one of the very next step."""
import tempfile
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from medlab.core import UserError, generator
from medlab.knobs.knobs import Knobs, PRECISIONS, SCHEDULES
from medlab.knobs.traits import Real
from medlab.recipes.base import UNFIT, Recipe
from medlab.step.schedule import from_torch
from medlab.train.trainer import Trainer

S = torch.optim.lr_scheduler
TORCH = dict(
    step=lambda o: S.StepLR(o, 30, 0.5), multi=lambda o: S.MultiStepLR(o, [20, 60]), exponential=lambda o: S.ExponentialLR(o, 0.97),
    annealing=lambda o: S.CosineAnnealingLR(o, 100), warm_restarts=lambda o: S.CosineAnnealingWarmRestarts(o, 25), poly=lambda o: S.PolynomialLR(o, 100),
    one_cycle=lambda o: S.OneCycleLR(o, max_lr=1.0, total_steps=200), cyclic=lambda o: S.CyclicLR(o, 1e-4, 1.0, 20), warm=lambda o: S.LinearLR(o, 0.01, 1.0, 50),
    chained=lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.1, 20), S.ExponentialLR(o, 0.9)], [20]), wave=lambda o: S.LambdaLR(o, lambda t: 1.5 + (-1) ** t))
SHAPES = {k: from_torch(make, 199) for k, make in TORCH.items()}
ALL = sorted(n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type))
OPTIMIZERS = [n for n in ALL if n not in UNFIT]  # the others are refused, with these reasons: see test_the_others_are_refused


class TinyKnobs(Knobs):
    stubborn = Real(0.5, 0, 1, help="a knob that cannot be changed").tag(unit="")


@dataclass
class Tiny(Recipe):
    "A dense network without biases, so that Muon takes it too."
    batch_size: int = 4
    Knobs = TinyKnobs

    def build_model(self): return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    def dataset(self): return [dict(x=torch.randn(4, generator=g), y=torch.randn(2, generator=g), case="") for g in [generator(0, "tiny")] for _ in range(16)]
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))
    def read(self, knob, model, default): return 0.5


def trainer(path, **fields):
    "A trainer with the rates that its optimizer had in each step, as `used`: step number → rate."
    t = Trainer(Tiny(**fields), path, threads=1, save_every=0)
    t.used = {}
    t.optimizer.register_step_pre_hook(lambda o, *_: t.used.update({t.step.iteration: o.param_groups[0]["lr"]}))
    return t


rates = st.floats(1e-6, 1e-2)
others = st.fixed_dictionaries({}, optional=dict(schedule=st.sampled_from(SCHEDULES), precision=st.sampled_from(PRECISIONS), warmup=st.integers(0, 60), horizon=st.integers(1, 60), lr_floor=st.sampled_from([0.0, 0.1])))
changes = st.tuples(st.integers(1, 9), rates | st.none(), others).map(lambda c: (c[0], c[2] | ({} if c[1] is None else dict(lr=c[1]))))
plan = st.tuples(st.integers(0, 150), rates, others, st.lists(changes.filter(lambda c: c[1]), min_size=1, max_size=5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking takes minutes
@given(plans=st.fixed_dictionaries({kind: plan for kind in (*SCHEDULES, *TORCH)}))
def test_the_requested_rate_is_the_next_ones(optimizer, plans):
    with tempfile.TemporaryDirectory() as folder, trainer(f"{folder}/run", optimizer=optimizer) as t:
        for kind in plans: check(t, kind, *plans[kind])


def check(t, kind, taken, lr, start, changes, steps=10):
    "Ten steps from anywhere in a schedule, with changes before any of them."
    t.step.optimizer_step, t.schedule.shape, begin = taken, SHAPES.get(kind), t.iteration
    asked = [t.set(at=begin + 1, **({"schedule": kind} if kind in SCHEDULES else {}), **{k: v for k, v in start.items() if k != "schedule"}, lr=lr)]
    asked += [t.set(at=begin + at, **change) for at, change in sorted(changes, key=lambda c: c[0])]
    t.fit(steps=steps, progress=False)
    told = t.run.metrics("lr", "skipped", start=begin + 1)
    recorded = dict(zip(told["lr"].step.tolist(), told["lr"].value.tolist()))
    last = {c.applied_step: c.requested["lr"] for c in asked if "lr" in c.requested}  # of several before one step the last counts
    limit = None
    for n in range(begin + 1, begin + steps + 1):
        if n in last: assert recorded[n] == (limit := last[n]), f"{kind}: step {n}"
        assert 0 <= recorded[n] <= limit, f"{kind}: step {n} exceeds the request"
        assert n not in t.used or t.used[n] == recorded[n], f"{kind}: step {n} used another rate than was recorded"
    assert sum(n in t.used for n in recorded) >= steps - told["skipped"].value.sum() and told["skipped"].value.sum() < steps
    settled(asked)


def settled(asked):
    "Each change is applied and verified, but for knobs that were asked for again before the same step."
    again = set()
    for c in reversed(asked):
        mine = {k for k in c.requested if (c.applied_step, k) not in again}
        assert (c.state, c.verified) == (("applied", True) if mine else ("refused", None)), c
        assert not mine or c.new == {k: c.requested[k] for k in mine}
        again |= {(c.applied_step, k) for k in c.requested}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rate_is_what_moves_the_weights(tmp_path, optimizer):
    "Two runs are the same until the step at which one of them is given another rate."
    weights = {}
    for name, lr in (("same", 1e-3), ("other", 3e-3)):
        with Trainer(Tiny(optimizer=optimizer), tmp_path / name, lr=1e-3, threads=1) as t:
            t.set(at=6, lr=lr)
            for step in (5, 6): t.fit(until=step, progress=False); weights[name, step] = torch.cat([p.detach().flatten() for p in t.model.parameters()])
    assert torch.equal(weights["same", 5], weights["other", 5]) and not torch.equal(weights["same", 6], weights["other", 6])


@pytest.mark.parametrize("optimizer", UNFIT)
def test_the_others_are_refused(tmp_path, optimizer):
    with pytest.raises(UserError, match=UNFIT[optimizer]): Trainer(Tiny(optimizer=optimizer), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_reverted_change_leaves_rate_and_schedule_as_they_were(tmp_path):
    with Trainer(Tiny(), tmp_path / "run", lr=1e-2, schedule="cosine", horizon=40, threads=1) as t:
        change = t.set(at=31, lr=5e-3, stubborn=0.1)
        t.fit(steps=40, progress=False)
        lr = t.run.metrics("lr")["lr"].value
    assert change.state == "reverted" and lr[30] == 5e-3 and lr[31:].max() < lr[29] < 1e-2 and t.knobs.lr == 1e-2
    assert lr[29] / lr[31] == pytest.approx(t.schedule.multiplier(29) / t.schedule.multiplier(31))
