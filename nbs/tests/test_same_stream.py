"""The same run on one, two and four ranks: the same samples with the same random numbers, and the same weights; and on another number after a resume."""
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from medlab import faults
from medlab.core import UserError, generator
from medlab.recipes.base import Recipe
from medlab.train.trainer import Trainer

pytestmark = pytest.mark.timeout(900)  # on a busy machine the ranks take a minute to start
STEPS = 30
COMMON = dict(gradient_accumulation_steps=4, lr=1e-3)


@dataclass
class Noisy(Recipe):
    "Noise in `prepare`, dropout in the network, and a loss term beside the loss; statistics too where `norm` asks for them."
    batch_size: int = 2
    norm: bool = False
    name = "noisy"

    def build_model(self): return nn.Sequential(nn.Linear(4, 16), *[nn.BatchNorm1d(16)] * self.norm, nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def dataset(self):
        x = torch.randn(23, 4, generator=generator(self.seed, "noisy"))  # no multiple of a batch, so that epochs run into one another
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"noisy{i:02}") for i, v in enumerate(x)]

    def prepare(self, batch, seed, step): return {**batch, "x": batch["x"] + 0.1 * torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(seed))}
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))


def recipe(name, **fields):
    "A tiny recipe."
    if name == "noisy": return Noisy(**fields)
    cls = getattr(importlib.import_module(f"medlab.recipes.{name}"), name.capitalize())
    return cls(**cls.tiny)


JOBS = [("noisy", ""), ("noisy", "changed"), ("noisy", "skip"), ("restoration", ""), ("segmentation", "")]  # (recipe, plan)
REFUSED = [("noisy", "statistics"), ("noisy", "few")]


class Seen:
    "Listens for the names of the cases of every step."
    def __init__(self): self.cases = {}
    def after_step(self, result, batch): self.cases[result.iteration] = [(m.number, m.names) for m in batch.micro_batches]


def plans(t, plan, rank, ranks):
    "What is planted, and what is asked for, on this rank."
    if plan == "changed": t.set(at=11, lr=3e-4)
    bad = plan == "skip" and (ranks == 1 or rank == 1)
    return [faults.gradient(next(n for n, p in t.model.named_parameters() if p.requires_grad), at=9)] if bad else []


def train(path, name, until, plan="", ranks=1, rank=0, resume=False):
    "Train to a step; what it came to."
    knobs = {} if resume else COMMON | dict(gradient_accumulation_steps=1) if plan == "few" else COMMON
    with Trainer(recipe(name, **(dict(norm=True) if plan == "statistics" else {})), path, resume=resume, device="cpu", threads=1, **knobs) as t:
        t.listeners.append(seen := Seen())
        with faults.plant(t, *plans(t, plan, rank, ranks)): t.fit(until=until, progress=False)
        weights = {k: v.clone() for k, v in t.model.state_dict().items()}
        return dict(weights=weights, cases=seen.cases, taken=t.step.optimizer_step, lr=t.last["lr"], loss=t.last["loss"])


def main(folder, rank, ranks, resume):
    "One rank of several: every job, or to go on with a run."
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    out = {}
    if resume: out["resumed"] = train(resume, "noisy", 40, ranks=ranks, rank=rank, resume=True)
    for name, plan in () if resume else JOBS: out[name, plan] = train(f"{folder}/{name}{plan}", name, STEPS, plan, ranks, rank)
    if ranks == 2: train(f"{folder}/begun", "noisy", 10, ranks=ranks, rank=rank)
    for name, plan in REFUSED if ranks == 2 else ():
        try: out[name, plan] = train(f"{folder}/{plan}", name, STEPS, plan, ranks, rank)
        except UserError as e: out[name, plan] = str(e)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def together(folder, ranks, resume=""):
    "Train on several ranks; what each of them came to."
    folder.mkdir()
    made = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(folder), str(r), str(ranks), str(resume)], stderr=subprocess.PIPE, text=True,
        env=os.environ | dict(OMP_NUM_THREADS="1")) for r in range(ranks)]
    try: told = [p.communicate(timeout=500)[1] for p in made]
    finally: [p.kill() for p in made]
    assert not any(p.returncode for p in made), "\n".join(told)[-3000:]
    return [torch.load(folder / f"{r}.pt") for r in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    "(folder, what came of the jobs on each of two ranks)"
    folder = tmp_path_factory.mktemp("ranks") / "2"
    return folder, together(folder, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory): return together(tmp_path_factory.mktemp("ranks") / "4", 4)


def apart(a, b): return max((float((a[k].double() - b[k].double()).abs().max()) for k in a), default=0.0)


def same_samples(one, many):
    "Whether the micro-batches of all ranks, put together by their numbers, are those of one process."
    for step, micros in one["cases"].items():
        found = dict(m for out in many for m in out["cases"][step])
        assert [found[i] for i in range(len(micros))] == [names for _, names in micros], step


@pytest.mark.parametrize("name,plan", JOBS)
def test_one_two_and_four_ranks_make_the_same_run(two, four, tmp_path, name, plan):
    one = train(tmp_path / "one", name, STEPS, plan)
    for outs in (two[1], four):
        many = [out[name, plan] for out in outs]
        same_samples(one, many)
        assert all(apart(many[0]["weights"], out["weights"]) == 0 for out in many), "to the bit among the ranks"
        assert all(out["taken"] == one["taken"] for out in many) and one["taken"] == STEPS - (plan == "skip")
        assert all(out["lr"] == one["lr"] for out in many) and one["lr"] == pytest.approx(3e-4 if plan == "changed" else 1e-3)
        print(name, plan, len(many), "ranks: weights apart by", apart(one["weights"], many[0]["weights"]))
        assert apart(one["weights"], many[0]["weights"]) <= 1e-6
        assert many[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_run_goes_on_with_another_number_of_ranks(two, tmp_path):
    whole, run = train(tmp_path / "whole", "noisy", 40), two[0] / "begun"
    on_one = train(run, "noisy", 20, resume=True)
    on_four = [out["resumed"] for out in together(tmp_path / "4", 4, run)]
    assert min(on_one["cases"]) == 11 and min(on_four[0]["cases"]) == 21
    same_samples({"cases": {k: v for k, v in whole["cases"].items() if k > 20}}, on_four)
    print("2 → 1 → 4 ranks: weights apart by", apart(whole["weights"], on_four[0]["weights"]))
    assert apart(whole["weights"], on_four[0]["weights"]) <= 1e-6 and on_four[0]["taken"] == 40


def test_what_ranks_cannot_do_alike_is_refused(two, tmp_path):
    for out in two[1]:
        assert "running_mean' of 1 (BatchNorm1d), and each of the 2 ranks" in out["noisy", "statistics"]
        assert "gradient_accumulation_steps=1 must be at least 2, the number of ranks" in out["noisy", "few"]
    assert all(train(tmp_path / plan, "noisy", 3, plan)["taken"] == 3 for _, plan in REFUSED), "one process takes both"


if __name__ == "__main__": main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
