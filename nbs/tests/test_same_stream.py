"""The same run on one, two and four ranks: the same samples with the same random numbers, and the same weights; and on another number after a resume."""
import contextlib
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from medlab import faults
from medlab.cli.options import recipe_class
from medlab.core import UserError, generator
from medlab.recipes.base import Recipe
from medlab.run.checkpoint import newest_state
from medlab.step import step as step_module
from medlab.step.device import DeviceDecisions
from medlab.train import trainer
from medlab.train.trainer import Trainer

pytestmark = pytest.mark.timeout(900)  # on a busy machine the ranks take a minute to start
STEPS, FEW = 30, int(os.environ.get("MEDLAB_RANK_STEPS", "3"))  # of the recipe below, and of those of medlab, which take longer
COMMON = dict(gradient_accumulation_steps=4, lr=1e-3, ema=0.9)


class Torn(list):
    "Samples, of which one cannot be read."
    def __getitem__(self, i): return super().__getitem__(i) if i != 15 else open("torn")


@dataclass
class Noisy(Recipe):
    "Noise in `prepare`, dropout in the network, and a loss term beside the loss; statistics too where `norm` asks for them."
    batch_size: int = 2
    norm: bool = False
    torn: bool = False  # whether a scan cannot be read
    name = "noisy"

    def build_model(self): return nn.Sequential(nn.Linear(4, 16), *[nn.BatchNorm1d(16)] * self.norm, nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def dataset(self):
        x = torch.randn(23, 4, generator=generator(self.seed, "noisy"))  # no multiple of a batch, so that epochs run into one another
        return (Torn if self.torn else list)(dict(x=v, y=v.sum(0, keepdim=True), case=f"noisy{i:02}") for i, v in enumerate(x))

    def prepare(self, batch, seed, step): return {**batch, "x": batch["x"] + 0.1 * torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(seed))}
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))


DOUBLE = dict(fast_ddpm=dict(image_size=(8, 8, 8)))  # torch has no fast convolution in float64


def length(name, plan): return FEW if name in OWN and plan != "plain" else STEPS


def recipe(name, plan="", **fields):
    "A tiny recipe."
    if name == "noisy": return Noisy(**fields)
    cls = recipe_class(name)
    return cls(**cls.tiny | {"": DOUBLE.get(name, {}), "plain": dict(optimizer="SGD")}.get(plan, {}))


def in_double(model):
    "Compute in float64: Adam divides gradients that are nothing but rounding by their own size, and float32 tells little where sums are added up in another order."
    cast = lambda _, args: tuple(v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in args)
    for m in model.double().modules(): m.register_forward_pre_hook(cast)


OWN = "fast_ddpm", "restoration", "segmentation", "slice_interpolation", "vjepa3d"
PLANS = "", "much", "device", "half", "late"
ON_DEVICE = "device", "half"  # plans under which the device decides; half is fp16, whose loss scale seeks its level
LIMITS = {"": 1e-9, "pieces": 0.0, "plain": 1e-6}  # how a recipe of medlab trains → how far weights may be apart: in float64; in float32 where a rank makes one micro-batch, so that two add up in one order; in float32 with SGD
LONG = bool(os.environ.get("MEDLAB_LONG"))  # then recipes of medlab divide their moments, too, and train with SGD, and runs go on as they were begun
JOBS = [(name, plan, parallel) for parallel in ("ddp", "zero1", "fsdp")
    for name, plan in (*(("noisy", plan) for plan in PLANS if LONG or parallel != "zero1" or plan in ("much", "late")),
        *((name, plan) for name in OWN for plan in LIMITS if LONG or parallel != "zero1" and plan != "plain"))]
REFUSED = [("noisy", "statistics"), ("noisy", "few")]


class Seen:
    "Listens for the names of the cases of every step."
    def __init__(self): self.cases = {}
    def after_step(self, result, batch): self.cases[result.iteration] = [(m.number, m.names) for m in batch.micro_batches]


def plans(t, plan, rank, ranks):
    "What is planted, and what is asked for, on this rank: much is a bad gradient, memory that runs out twice, a torn scan and another learning rate."
    if plan not in ("much", *ON_DEVICE): return []
    t.set(at=11, lr=3e-4)
    here = lambda r: ranks == 1 or rank == r % ranks
    weight = next(n for n, p in t.model.named_parameters() if p.requires_grad)
    bad = [faults.gradient(weight, at=9)] * here(1)
    if plan in ON_DEVICE: return bad
    return bad + [faults.out_of_memory("backward", at=14)] * here(2) + [faults.out_of_memory("optimizer", at=22)] * here(0)


def fails_at(call, function):
    "A function for which memory runs out in one call: when the ranks have agreed on the step, and others take it."
    calls = []

    def _call(*args):
        calls.append(1)
        if len(calls) == call: raise torch.OutOfMemoryError("out of memory")
        return function(*args)
    return _call


def train(path, name, until, plan="", ranks=1, rank=0, resume=False, parallel="ddp"):
    "Train to a step; what it came to."
    knobs = {} if resume else COMMON | dict(gradient_accumulation_steps=1) if plan == "few" else COMMON
    if plan == "much": knobs = knobs | dict(case_budget=1, save_every=5)
    if plan in ON_DEVICE: knobs = knobs | dict(log_every=4)
    if plan == "half": knobs = knobs | dict(precision="fp16")
    if plan == "late": knobs = knobs | dict(save_every=5)
    if plan in LIMITS and name in OWN: knobs = knobs | {"pieces": dict(gradient_accumulation_steps=2), "plain": dict(lr=1e-3 if name == "segmentation" else 1e-2)}.get(plan, {})
    strategy = mock.patch.object(trainer, "decisions_for", lambda optimizer: DeviceDecisions) if plan in ON_DEVICE else contextlib.nullcontext()
    if plan == "late" and rank == min(1, ranks - 1): strategy = mock.patch.object(step_module, "clip_gradients", fails_at(18, step_module.clip_gradients))
    fields = dict(statistics=dict(norm=True), much=dict(torn=True)).get(plan, {})
    with strategy, Trainer(recipe(name, plan, **fields), path, resume=resume, device="cpu", threads=1, parallel=parallel, **knobs) as t:
        if name in OWN and not plan: in_double(t.model)
        begun = {k: v.clone() for k, v in t.model.state_dict().items()}
        t.listeners.append(seen := Seen())
        with faults.plant(t, *plans(t, plan, rank, ranks)): t.fit(until=until, progress=False)
        weights = {k: v.clone() for k, v in t.model.state_dict().items()}
        average = None if rank else newest_state(path)[0]["step"]["ema"]
        return dict(weights=weights, moved=apart(weights, begun), average=average, cases=seen.cases, taken=t.step.optimizer_step, lr=t.last["lr"], terms={k: v for k, v in t.last.items() if k in t.step.term_names},
            moments={i: float(v["exp_avg"].abs().sum()) for i, v in t.optimizer.state_dict()["state"].items() if "exp_avg" in v},
            out=sorted(t.quarantine.samples.out), micro=t.knobs.micro_batch, skips=[e.step for e in t.run.events("skip")], back=[e.text for e in t.run.events("restore")])


def jobs(folder, rank, ranks):
    "Every job; what each came to."
    out = {}
    for name, plan, how in JOBS:
        if plan != "pieces" or ranks == 2: out[name, plan, how] = train(f"{folder}/{name}{plan}{how}", name, length(name, plan), plan, ranks, rank, parallel=how)
    for how in ("ddp", "zero1", "fsdp") if ranks == 4 else (): train(f"{folder}/begun {how}", "noisy", 10, ranks=ranks, rank=rank, parallel=how)
    for name, plan in REFUSED if ranks == 2 else ():
        try: out[name, plan] = train(f"{folder}/{plan}", name, STEPS, plan, ranks, rank)
        except UserError as e: out[name, plan] = str(e)
    return out


def main(folder, rank, ranks, until, *resumed):
    "One rank of several: every job, or to go on with runs, each in a way of its own."
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    on = lambda run: train(run, "noisy", until, ranks=ranks, rank=rank, resume=True, parallel=resumed[run])
    resumed = dict(zip(resumed[::2], resumed[1::2]))
    torch.save({run: on(run) for run in resumed} if resumed else jobs(folder, rank, ranks), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def together(folder, ranks, until=0, resumed=()):
    "Train on several ranks, or go on with runs: (directory, way) pairs; what each rank came to."
    folder.mkdir()
    words = [str(folder), str(ranks), str(until), *(str(w) for pair in resumed for w in pair)]
    made = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, words[0], str(r), *words[1:]], stderr=subprocess.PIPE, text=True,
        env=os.environ | dict(OMP_NUM_THREADS="1")) for r in range(ranks)]
    try: told = [p.communicate(timeout=500)[1] for p in made]
    finally: [p.kill() for p in made]
    assert not any(p.returncode for p in made), "\n".join(told)[-3000:]
    return [torch.load(folder / f"{r}.pt") for r in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory): return together(tmp_path_factory.mktemp("ranks") / "2", 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    "(folder, what came of the jobs on each of four ranks)"
    folder = tmp_path_factory.mktemp("ranks") / "4"
    return folder, together(folder, 4)


def apart(a, b): return max((float((a[k].double() - b[k].double()).abs().max()) for k in a), default=0.0)


def same_samples(one, many):
    "Whether the micro-batches of all ranks, put together by their numbers, are those of one process."
    for step, micros in one["cases"].items():
        found = dict(m for out in many for m in out["cases"][step])
        assert [found[i] for i in range(len(micros))] == [names for _, names in micros], step


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "A function that gives what one process comes to."
    @functools.cache
    def alone(name, plan, steps): return train(tmp_path_factory.mktemp("alone") / "one", name, steps, plan)
    return alone


@pytest.mark.parametrize("name,plan,parallel", JOBS)
def test_one_two_and_four_ranks_make_the_same_run(two, four, alone, name, plan, parallel):
    steps, limit = length(name, plan), LIMITS[plan] if name in OWN else 1e-6
    one = alone(name, "" if plan == "late" else plan, steps)  # alone it is made again in smaller parts, with other dropout
    planted, back = plan in ("much", *ON_DEVICE), dict(much=20, late=15).get(plan)
    assert one["moved"] > 1e-6
    assert {9} < {*one["skips"]} if plan == "half" else one["skips"] == [9] * planted
    if plan == "plain": limit = min(limit, 1e-3 * one["moved"])  # such steps are short
    for outs in (two, four[1])[:1 if plan == "pieces" else 2]:
        many = [out[name, plan, parallel] for out in outs]
        same_samples(one, many)
        assert all(apart(many[0]["weights"], out["weights"]) == 0 for out in many), "to the bit among the ranks"
        assert all(out["taken"] == one["taken"] for out in many) and one["taken"] == steps - len(one["skips"])
        assert all(out["skips"] == one["skips"] for out in many), "one in the log for each step that was skipped"
        assert all(out["lr"] == one["lr"] for out in many) and (one["lr"] == pytest.approx(3e-4) or not planted)
        assert all(out["out"] == one["out"] == [15] * (plan == "much") for out in many) and all(out["micro"] == one["micro"] == (1 if plan == "much" else None) for out in many)
        assert [len(out["back"]) for out in many] == [back is not None] * len(many) and all(f"checkpoint of step {back}" in text for out in [one, *many] for text in out["back"])
        kept = [{*out["moments"]} for out in many]
        if parallel == "ddp": assert all(k == {*one["moments"]} for k in kept)
        else: assert set().union(*kept) == {*one["moments"]} and sum(map(len, kept)) == len(one["moments"]), "each keeps the moments of its own parameters"
        print(name, plan, parallel, len(many), "ranks: weights moved by", one["moved"], "and apart by", apart(one["weights"], many[0]["weights"]))
        assert apart(one["weights"], many[0]["weights"]) <= limit
        assert apart(one["average"], many[0]["average"]) <= limit and [*one["average"]] == [*many[0]["average"]]
        for out in many: assert out["terms"] == pytest.approx(one["terms"], rel=1e-4), "every loss term is that of all samples"


WAYS = ("zero1", "ddp"), ("ddp", "fsdp"), ("fsdp", "zero1"), *((("ddp", "ddp"), ("zero1", "zero1"), ("fsdp", "fsdp")) if LONG else ())


@pytest.fixture(scope="module")
def resumed(four, tmp_path_factory):
    "(what one process comes to; how the runs were begun and gone on with → what two ranks, one and four came to, one after another)"
    folder = tmp_path_factory.mktemp("resumed")
    runs = {way: shutil.copytree(four[0] / f"begun {way[0]}", folder / "-".join(way)) for way in WAYS}
    on_two = together(folder / "2", 2, 20, [(run, then) for (_, then), run in runs.items()])
    on_one = {run: train(run, "noisy", 30, resume=True, parallel=then) for (_, then), run in runs.items()}
    on_four = together(folder / "4", 4, 40, [(run, begun) for (begun, _), run in runs.items()])
    came = lambda outs, run: [out[str(run)] for out in outs]
    return train(folder / "whole", "noisy", 40), {way: (came(on_two, run), [on_one[run]], came(on_four, run)) for way, run in runs.items()}


@pytest.mark.parametrize("begun,then", WAYS)
def test_a_run_goes_on_with_another_number_of_ranks(resumed, begun, then):
    whole, parts = resumed[0], resumed[1][begun, then]
    later = lambda step: {"cases": {k: v for k, v in whole["cases"].items() if step - 10 < k <= step}}
    for step, many in zip((20, 30, 40), parts, strict=True): same_samples(later(step), many)
    on_four = parts[-1]
    print(begun, then, "4 → 2 → 1 → 4 ranks: weights apart by", apart(whole["weights"], on_four[0]["weights"]))
    assert apart(whole["average"], on_four[0]["average"]) <= 1e-6
    assert apart(whole["weights"], on_four[0]["weights"]) <= 1e-6 and on_four[0]["taken"] == 40


def test_what_ranks_cannot_do_alike_is_refused(two, tmp_path):
    for out in two:
        assert "running_mean' of 1 (BatchNorm1d), and each of the 2 ranks" in out["noisy", "statistics"]
        assert "gradient_accumulation_steps=1 must be at least 2, the number of ranks" in out["noisy", "few"]
    assert all(train(tmp_path / plan, "noisy", 3, plan)["taken"] == 3 for _, plan in REFUSED), "one process takes both"


if __name__ == "__main__": main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
