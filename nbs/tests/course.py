"""The course on which `identity.py` trains every recipe: faults, changes, a stop and a resume, each at a fixed step."""
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
from identity import digests, named
from torch import nn

from medlab import Trainer, recipes
from medlab.core import generator

# layout: what lies elsewhere, or is called otherwise, in other revisions

try: from medlab.recipes.base import Recipe
except ImportError: from medlab.train.recipe import Recipe


def mark(batch, marks):
    "A prepared micro-batch that knows where each of its samples came."
    return {**batch, "course": marks}


def marks(batch):
    "The (step, number of the preparation for that step, place) of each sample."
    return batch["course"]


# faults

OUT_OF_MEMORY = dict(forward=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    backward=lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes"))


def fail(where): raise OUT_OF_MEMORY[where]()


class Reads(torch.utils.data.Dataset):
    "A dataset that is told of every sample that is read from it."
    seeded = True

    def __init__(self, dataset, see): self.dataset, self.see, self.reads = dataset, see, 0
    def __len__(self): return len(self.dataset)

    def __getitem__(self, key):
        self.reads += 1
        return self.see(self.reads, self.dataset[key[0] if isinstance(self.dataset, list) else key])


class Faulty:
    "A recipe in which things go wrong at fixed places of the course. Comes before the recipe's class."
    spoiled, unreadable = 11, 26  # samples, in the order in which they are read
    no_loss, no_gradient = 12, 16  # steps
    no_memory = (20, "forward")  # step, pass
    planned = ("spoiled", "unreadable", "no_loss", "no_gradient", "no_memory")

    def __post_init__(self):
        super().__post_init__()
        self.prepared, self.happened, self.fed = Counter(), Counter(), False

    def happens(self, fault, now=True):
        "Note a fault that happens now."
        self.happened[fault] += bool(now)
        return now

    def dataset(self):
        "The first is the trainer's; others are made for scores, and stay sound."
        if self.fed: return super().dataset()
        self.fed = True
        return Reads(super().dataset(), self.seen)

    def seen(self, reads, sample):
        "A sample as it is, with a NaN in it, or not at all."
        if self.happens("unreadable", reads == self.unreadable): raise OSError("planted: it cannot be read")
        if not self.happens("spoiled", reads == self.spoiled): return sample
        image = sample["image"].clone()
        image.view(-1)[0] = math.nan
        return {**sample, "image": image}

    def prepare(self, batch, seed, step=None):
        self.prepared[step] += 1
        n, made = len(batch["case"]), super().prepare(batch, seed, step)
        return mark(made, [(step, self.prepared[step], i) for i in range(n)])

    def losses(self, model, batch):
        out, (step, turn, _) = super().losses(model, batch), marks(batch)[0]
        factors = [math.nan if self.is_bad(m, case) else 1.0 for m, case in zip(marks(batch), batch["case"])]
        if self.happens("no_loss", any(map(math.isnan, factors))): out["loss"] = out["loss"] * torch.tensor(factors)
        cut = out["loss"].requires_grad and self.cuts(step, turn)
        if self.happens("no_gradient", cut): out["loss"].register_hook(lambda g: g * math.nan)
        self.starve(step, out["loss"])
        return out

    def is_bad(self, mark, case): "Whether a sample's loss is NaN."; return mark == (self.no_loss, 1, 0)
    def cuts(self, step, turn): "Whether a micro-batch's gradient is NaN."; return (step, turn) == (self.no_gradient, 1)

    def starve(self, step, loss):
        "Let memory run out, once."
        at, where = self.no_memory
        if not self.happens("no_memory", step == at and not self.happened["no_memory"]): return
        if where == "backward": loss.register_hook(lambda g: fail(where))
        else: fail(where)


@dataclass
class Regression(Recipe):
    "BatchNorm, dropout and noise, so that buffers and random state matter; trains in milliseconds."
    batch_size: int = 8
    name = "toy"

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def dataset(self):
        x = torch.randn(48, 4, generator=generator(self.seed, "toy"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i:02}") for i, v in enumerate(x)]

    def prepare(self, batch, seed, step=None):
        noise = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(seed))
        return {**batch, "x": batch["x"] + 0.01 * noise}

    def losses(self, model, batch):
        error = model(batch["x"]) - batch["y"]
        return dict(loss=error.square().mean(1), mae=error.detach().abs().mean(1))


class Toy(Faulty, Regression):
    "Two bad cases, which end in quarantine, and a fault that lasts until every rung of the ladder was climbed."
    no_memory = (15, "backward")
    planned = ("unreadable", "no_loss", "no_gradient", "no_memory")

    def seen(self, reads, sample):
        if self.happens("unreadable", sample["case"] == "toy11"): raise OSError("planted: it cannot be read")
        return sample

    def is_bad(self, mark, case): return case == "toy07"
    def cuts(self, step, turn): return 22 <= step <= 33 and turn <= 6  # three times: two micro-batches to a step


# the course

STEPS = 60
COMMON = dict(gradient_accumulation_steps=2, ema=0.95, weight_decay=0.01, warmup=5, horizon=50, regrow_after=12,
    save_every=20, keep=3, cleanup=False, leak_alarm=0.0)
CHANGES = {30: dict(lr=5e-4), 40: dict(clip_norm=0.05), 45: dict(gradient_accumulation_steps=3),
    50: dict(activation_checkpointing=True), 54: dict(check_inputs=False, ema=0.9)}
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Case:
    "A recipe on the course."
    base: type
    fields: dict
    knobs: dict
    changes: dict  # step before which they are asked for → knobs

    def recipe(self, seed):
        "The recipe with its faults."
        faulty = self.base if issubclass(self.base, Faulty) else type("Faulty", (Faulty, self.base), {})
        return faulty(**self.fields, seed=seed)


def cases():
    "Name → case. The networks are as small as they can be: half precision is slow on a CPU."
    small = dict(val_every_steps=30, val_cases=1, lr=2e-3, clip_norm=1.0)
    return dict(
        fast_ddpm=Case(recipes.FastDDPM, dict(image_size=(8, 8, 8), channels=(4, 4), num_res_blocks=1, norm_groups=2,
            phantoms=8, batch_size=2), small | dict(schedule="cosine"), CHANGES),
        restoration=Case(recipes.Restoration, dict(image_size=(16, 16), dim=4, blocks=(1, 1), refinement=0,
            phantoms=8, batch_size=2), small | dict(schedule="linear", fft_fp32=False),
            CHANGES | {35: dict(fft_loss_norm="ortho", norm_eps=1e-4)}),
        segmentation=Case(recipes.Segmentation, dict(image_size=(16, 16, 16), filters=(2, 4, 4), phantoms=8),
            small | dict(schedule="restarts"), CHANGES | {35: dict(surface_weight=0.5, surface_every=2)}),
        toy=Case(Toy, {}, dict(lr=1e-2, clip_norm=5.0, escalate_after=3, calm_after=15, scale_critical=20000.0,
            save_every=10), CHANGES | {17: dict(clip_by_loss=True)}))


def request(run):
    "What another process asks for: a change that is sound, and one that is not, which shows that both were heard."
    run.request("panel", 8, lr=5e-3)
    refused = run.request("panel", 9, lr=-1.0)
    for _ in range(600):
        if any(c.id == refused and c.state == "refused" for c in run.changes()): return
        time.sleep(0.05)
    raise TimeoutError("a request was not heard within 30 s")


def ask(trainer, case, first, last):
    "Ask for the changes of these steps."
    for at, knobs in sorted(case.changes.items()):
        if first <= at <= last: trainer.set(at=at, **named(knobs, case.base.Knobs))


def train(case, path, seed, precision):
    "Run the course in a directory, with a stop and a resume after two thirds of it; its digests."
    knobs, stop = named(COMMON | case.knobs | dict(precision=precision), case.base.Knobs), STEPS * 2 // 3
    with Trainer(recipe := case.recipe(seed), path, device="cpu", threads=1, **knobs) as t:
        request(t.run)
        ask(t, case, 1, stop)
        t.fit(until=stop, progress=False)
    if never := [f for f in recipe.planned if not recipe.happened[f]]: sys.exit(f"never happened: {', '.join(never)}")
    with Trainer(case.recipe(seed), path, resume=True, device="cpu", threads=1) as t:
        ask(t, case, stop + 1, STEPS)
        t.fit(until=STEPS, progress=False)
        return digests(t)


def chosen(only):
    "(name, case, precision) of the runs whose names hold one of the words; of all where there is none."
    all_ = [(f"{n}-{p}", c, p) for n, c in cases().items() for p in PRECISIONS]
    return [r for r in all_ if not only or any(word in r[0] for word in only)]
