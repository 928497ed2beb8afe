"""Random courses of faults and changes end alike, whether the host decides at every step or the device does.

MEDLAB_SEQUENCES=500 pytest nbs/tests/test_strategies.py draws more of them than the usual 24.

Two things differ by intention. A sample with a non-finite loss leaves the batch on the host, and the step is taken with
the others; the device, which nobody may ask, leaves the step out, and its cases are named when they are read. And what
a guard *does* about a step comes after the logging interval, so guards that act have no budget here.

The second look at a skipped step comes later, too, and finds the same: a batch that is no longer at hand is read again. It
looks with the weights of now, so it is compared for faults that do not hang on them: a gradient that overflows in half
precision ("huge") does, by the loss scale.
"""
import math
import os
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from medlab.core import generator
from medlab.recipes.base import Recipe
from medlab.step.device import DeviceDecisions
from medlab.step.step import HostDecisions
from medlab.train import trainer as train
from medlab.train.trainer import Trainer

SEQUENCES, STEPS, FAULTS = int(os.environ.get("MEDLAB_SEQUENCES", 24)), 24, ("inf", "nan", "huge", "detached", "sample", "part")
OWN = "diagnosis", "segment", "checkpoint", "command"  # compared apart, or of the end


@dataclass
class Toy(Recipe):
    "Batch statistics, dropout, two groups of parameters, and faults at given steps."
    batch_size: int = 4
    faults: tuple = ()  # of (step, kind)
    bad: tuple = ()  # samples that cannot be read
    groups: bool = False
    batch_norm: bool = True
    name = "toy"

    def build_model(self):
        norm = nn.BatchNorm1d(8) if self.batch_norm else nn.Identity()
        first = nn.Linear(4, 8, bias=not self.batch_norm)  # before a normalization its gradient would be mere rounding
        return nn.Sequential(first, norm, nn.SiLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def build_optimizer(self, params, **kw):
        if not self.groups: return super().build_optimizer(params, **kw)
        return super().build_optimizer([dict(params=params[:1], lr_scale=0.25), dict(params=params[1:])], **kw)

    def dataset(self):
        x = torch.randn(40, 4, generator=generator(self.seed, "strategies"))
        items = [dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i:02}") for i, v in enumerate(x)]
        for i in self.bad: items[i]["x"][0] = math.nan
        return items

    def prepare(self, batch, seed, step):
        fault = dict(self.faults).get(step)
        noise = 0.01 * torch.randn(batch["x"].shape, generator=generator(seed, "noise"))
        return {**batch, "x": batch["x"] + noise, "fault": [fault] * len(noise)}

    def losses(self, model, batch):
        out, fault = model(batch["x"]), batch["fault"][0]
        factor = dict(inf=math.inf, nan=math.nan, huge=1e5).get(fault)
        if factor: out.register_hook(lambda g: g * factor)
        if fault == "detached": out = out.detach()
        loss = (out.float() - batch["y"]).square().mean(1)
        terms = dict(part=loss.detach() * 2) if fault == "part" else {}
        if fault == "sample": loss = loss + torch.tensor([math.nan if int(c[3:]) % 3 == 0 else 0.0 for c in batch["case"]])
        return dict(loss=loss, **terms)


def drawn(seed):
    "A course: (recipe, knobs, changes by step)."
    r = random.Random(seed)
    steps = r.sample(range(2, STEPS), r.randint(0, 5))
    kinds = [r.choice(FAULTS) for _ in steps]
    recipe = dict(seed=seed, batch_size=r.choice((2, 4)), faults=tuple(zip(steps, kinds)), groups=r.random() < 0.4,
        bad=tuple(r.sample(range(40), r.choice((0, 0, 2)))), batch_norm=r.random() < 0.5)
    options = dict(lr=(1e-2, 3e-3), clip_norm=(None, 0.05, 1.0), ema=(None, 0.9), gradient_accumulation_steps=(1, 2, 3),
        precision=("fp32", "bf16", "fp16"), weight_decay=(0.0, 0.1), clip_by_loss=(False, True))
    knobs = {k: r.choice(v) for k, v in options.items()}
    knobs |= dict(schedule=r.choice(("constant", "cosine", "restarts")), warmup=r.choice((0, 5)), horizon=16)
    changed = [(r.randint(2, STEPS), r.choice([k for k in options if k != "precision"])) for _ in range(r.randint(0, 3))]
    return recipe, knobs, [(at, {k: r.choice(options[k])}) for at, k in changed]


def trained(path, course, decisions, log_every, monkeypatch):
    "What a course ends in: (trainer's state, rows, events, accused cases)."
    recipe, knobs, changes = course
    monkeypatch.setattr(train, "decisions_for", lambda *args: decisions)
    quiet = dict(escalate_after=None, max_skips=10**6, max_first_skips=None, case_budget=None, drop_looks=0, save_every=0,
        zero_alarm=None)
    with Trainer(Toy(**recipe), path, threads=1, log_every=log_every, **quiet, **knobs) as t:
        for at, change in changes: t.set(at=at, **change)
        t.fit(STEPS, progress=False)
        names = "loss", "part", "lr", "grad_norm", "clip", "scale", "skipped", "samples", "dropped", "taken", "skips"
        rows = {k: s.value.tolist() for k, s in t.run.metrics().items() if k in names}
        events = [(e.step, e.kind) for e in t.run.events() if e.kind not in OWN]
        named = sorted((e.step, c) for e in t.run.events() if e.kind in ("drop", "nonfinite_loss") and e.data.get("where") != "none" for c in e.data["cases"])
        looks = {e.step: (e.data.get("where"), e.data.get("module"), tuple(e.data.get("cases", ())), tuple(e.data["batch"])) for e in t.run.events("diagnosis")}
        batches = {e.step: e.data["batch"] for e in t.run.events("skip")}
        averages = t.step.ema.shadow if t.step.ema else {}
        weights = torch.cat([v.double().flatten() for v in (*t.model.state_dict().values(), *averages.values())])
        moments = [v.double().flatten() for s in t.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        asked = [(c.applied_step, c.state, {k: short(v) for k, v in (c.new or {}).items()}) for c in t.run.changes()]  # new is None where refused
        return dict(weights=weights, moments=torch.cat(moments), rows=rows, events=events, named=named,
            looks=looks, marks={c: t.quarantine.cases.count(c) for c in t.quarantine.cases.marks}, batches=batches, counts=(t.step.optimizer_step, t.step.consecutive_skips, t.batches.samples_seen), asked=asked)


def short(value):
    "A number as float32 has it: the device's learning rate is one."
    return float(f"{value:.6g}") if isinstance(value, float) else value


def until(rows, end):
    "Rows up to a step."
    return {k: v[:end] for k, v in rows.items() if k != "part"}


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_a_course_ends_alike(seed, tmp_path, monkeypatch):
    course, log_every = drawn(seed), random.Random(-seed - 1).randint(1, 20)
    a = trained(tmp_path / "host", course, HostDecisions, 1, monkeypatch)
    b = trained(tmp_path / "device", course, DeviceDecisions, log_every, monkeypatch)
    lost = [s for s, kind in course[0]["faults"] if kind == "sample"]
    compare_looks(a, b, course, lost)
    if lost:
        c = trained(tmp_path / "at once", course, DeviceDecisions, 1, monkeypatch)
        assert sure(b["looks"], course) == sure(c["looks"], course) and b["batches"] == c["batches"]
        if not any(kind == "huge" for _, kind in course[0]["faults"]): assert b["marks"] == c["marks"], "each case is accused as often"
    assert a["asked"] == b["asked"] and a["named"] == b["named"]
    if lost: return compare(until(a["rows"], min(lost) - 1), until(b["rows"], min(lost) - 1), course)
    assert a["events"] == b["events"] and a["counts"] == b["counts"]
    if course[0]["batch_norm"] and course[0]["batch_size"] == 2: return  # normalized, two values are but signs: chaos
    compare(a["rows"], b["rows"], course)
    for k in ("weights", "moments"): torch.testing.assert_close(a[k], b[k], rtol=1e-3, atol=1e-4)


def sure(looks, course, before=STEPS + 1):
    "Second looks before a step, of faults that no weights and no loss scale have to do with; of the others, that there was one."
    kinds = dict(course[0]["faults"])
    return {s: look if kinds.get(s) in ("inf", "nan", "detached", "sample") else None for s, look in looks.items() if s < before}


def compare_looks(a, b, course, lost):
    "Every skipped step is looked at on the device as on the host, and names its cases, wherever in an interval it lay."
    end = min(lost, default=STEPS + 1)
    assert sure(a["looks"], course, end) == sure(b["looks"], course, end), course
    for x in (a, b): assert all(names or step in dict(course[0]["faults"]) or course[0]["bad"] for step, names in x["batches"].items())
    assert {s: v for s, v in a["batches"].items() if s < end} == {s: v for s, v in b["batches"].items() if s < end}


def compare(a, b, course):
    "Rows of both, as equal as the order of float additions lets them be."
    for name in a:
        got, wanted = torch.tensor(b[name], dtype=torch.float64), torch.tensor(a[name], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5, equal_nan=True, msg=lambda m: f"{name}: {m}\n{course}")
