"""Whoever asks a GPU for a value waits for it. Between the loader and the optimizer nobody asks: not a recipe, not a loss.

MEDLAB_WAITS=all tries every loss in every precision; else each in fp32, and each recipe's first in the others.
"""
import contextlib
import functools
import math
import os

import pytest
import torch
from fake_device import CUDA, DeviceTensor, FakeDevice

from medlab import recipes
from medlab.batches.loading import Guarded, collate
from medlab.contracts.batch import Batch, StepBatch
from medlab.losses import edt, surface
from medlab.knobs.knobs import Knobs
from medlab.recipes import vjepa3d
from medlab.step import step as step_module
from medlab.step.device import DeviceDecisions
from medlab.step.schedule import LRSchedule
from medlab.step.step import Step

TINY = dict(fast_ddpm=recipes.FastDDPM, restoration=recipes.Restoration, segmentation=recipes.Segmentation, vjepa3d=recipes.VJEPA3D)


@functools.cache
def made(name, **config):
    "A tiny recipe that is set up."
    cls = TINY[name]
    recipe = cls(**{**cls.tiny, "batch_size": 2, **config})
    recipe.setup()
    return recipe


@contextlib.contextmanager
def fake_device(monkeypatch):
    "The device, with autocast of the CPU, and the distance transform as the kernel that it is on a GPU."
    autocast = step_module.autocast
    monkeypatch.setattr(step_module, "autocast", lambda precision, device: autocast(precision, torch.device("cpu")))

    def distances(mask, *args):
        if not isinstance(mask, DeviceTensor): return edt.signed_distance_map(mask, *args)
        return DeviceTensor(edt.signed_distance_map(mask.held, *args))

    monkeypatch.setattr(surface, "signed_distance_map", distances)
    with FakeDevice() as device: yield device


def prepared(recipe, device, n, parts=1):
    "The batch of step n, as the loader makes it."
    data, b, micros = Guarded(recipe.dataset()), recipe.batch_size, []
    for i in range(parts):
        samples = collate([data[(n + i + k) % len(data), n] for k in range(b)]).samples
        micros.append(Batch.of(recipe.prepare({k: device.put(v) for k, v in samples.items()}, 1000 * n + i, n)))
    return StepBatch.of(*micros)


def step_of(recipe, device, **knobs):
    "A step on the device, which decides there."
    k = recipe.Knobs(**{**recipe.initial_knobs(), **knobs})
    torch.manual_seed(0)
    recipe.knobs = k
    system = recipe.build_system()
    device.place(system.model).train()
    for average in system.averages.values():
        device.place(average.network)
        average.pairs = [*average.network.parameters()], [*average.source.parameters()]
    for name in {*knobs} - Knobs.class_traits().keys(): recipe.apply(name, getattr(k, name), system.model)
    params = [p for p in system.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(k.lr, device=CUDA), fused=True)
    step = Step(system, optimizer, recipe.bind_losses(system), k, LRSchedule(k), device=CUDA, decisions=DeviceDecisions)
    step.decisions.patience = math.inf  # however slow this machine is
    recipe.listeners(step.losses, lambda *values: None, lambda *event, **data: None)  # as for a trainer, whose listeners are called later
    return step


def waits_of(monkeypatch, make, precision, steps=2, log_every=2, **knobs):
    "(waits of the steps after the first, which looks at what there is; results)."
    with fake_device(monkeypatch) as device:
        recipe, results = make(), []
        step = step_of(recipe, device, precision=precision, log_every=log_every, ema=0.9, **knobs)
        for n in range(1, steps + 1):
            if n == 2: device.waits.clear()
            step(n, prepared(recipe, device, n))
            results += step.settle()
    return device.waits, results


CASES = [("fast_ddpm", c, {}) for c in ({}, dict(prediction="sample"), dict(prediction="v_prediction"), dict(target="t2w"),
    dict(label_target=False), dict(spacing="nonuniform"))]
CASES += [("restoration", c, k) for c, k in (({}, {}), (dict(pixel_loss="charbonnier"), {}), ({}, dict(fft_loss_norm="ortho")),
    ({}, dict(fft_loss_norm="size")), ({}, dict(fft_ortho=True, norm_fp32=False)), (dict(network="depth"), {}),
    (dict(network="strip"), {}), (dict(network="restormer", blocks=(1, 1)), {}))]
CASES += [("segmentation", c, k) for c, k in (({}, {}), ({}, dict(cldice_weight=0.5)), ({}, dict(surface_weight=0.5)),
    ({}, dict(surface_weight=0.5, surface_every=2)), (dict(maps=False), dict(surface_weight=0.5)),
    (dict(surface="boundary"), dict(surface_weight=0.5)), (dict(scheme="source"), dict(surface_weight=0.5, surface_every=2)),
    (dict(supervision=1), {}), (dict(ignore=4), {}))]
CASES += [("vjepa3d", c, k) for c, k in (({}, {}), ({}, dict(look_every=1)), (dict(masks="random", levels=2), dict(look_every=2)),
    (dict(dense=True), dict(dense_weight=0.5)))]


EVERY = os.environ.get("MEDLAB_WAITS") == "all"
TRIED = [(*case, p) for case in CASES for p in ("fp32", "bf16", "fp16") if EVERY or p == "fp32" or case[1:] == ({}, {})]

names = lambda v: v if isinstance(v, str) else "-".join(f"{k}={x}" for k, x in v.items()) or "default"


@pytest.mark.parametrize("name, config, knobs, precision", TRIED, ids=names)
def test_no_recipe_and_no_loss_waits(monkeypatch, name, config, knobs, precision):
    waits, results = waits_of(monkeypatch, lambda: made(name, **config), precision, **knobs)
    assert [(w.what, w.where.split(":")[0]) for w in waits] == [("tolist", "medlab/step/device.py")], [*map(str, waits)]
    assert len(results) == 2 and all(r.loss_terms["loss"] > 0 for r in results)


def test_a_look_that_waits_is_seen(monkeypatch):
    "So a look is taken in the steps above, and none of its values is asked for."
    send = vjepa3d.send
    monkeypatch.setattr(vjepa3d, "send", lambda signals, gram: [gram.sum().item(), send(signals, gram)][1])
    waits, _ = waits_of(monkeypatch, lambda: made("vjepa3d"), "fp32", look_every=1)
    assert {w.where.split(":")[0] for w in waits} == {"nbs/tests/test_waits.py", "medlab/step/device.py"}, [*map(str, waits)]


class Toy(recipes.Restoration):
    "A recipe into whose losses something can be planted."
    planted = staticmethod(lambda batch, out: None)

    def losses(self, model, batch):
        made = model(batch["image"])
        out = dict(loss=(made - batch["target"]).square().flatten(1).mean(1))
        self.planted(batch, out)
        return out

    def build_model(self, device=None): return torch.nn.Conv2d(1, 1, 3, padding=1, device=device)


def toy(planted=None):
    "It, set up."
    recipe = Toy(**{**Toy.tiny, "batch_size": 2})
    if planted: recipe.planted = planted
    recipe.setup()
    return recipe


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("log_every", (1, 4))
def test_the_step_waits_once_in_a_logging_interval(monkeypatch, precision, log_every):
    waits, results = waits_of(monkeypatch, toy, precision, steps=13, log_every=log_every, clip_norm=0.5)
    assert len(results) == 13 // log_every * log_every and len(waits) == len(results) // log_every - (log_every == 1)
    assert {w.what for w in waits} == {"tolist"}


PLANTS = dict(
    item=lambda b, out: out["loss"].mean().item(), bool=lambda b, out: bool((out["loss"] > 1e9).any()),
    int=lambda b, out: int(out["loss"].argmax()), tolist=lambda b, out: out["loss"].tolist(),
    cpu=lambda b, out: out["loss"].detach().cpu(), to=lambda b, out: out["loss"].to("cpu"),
    truth=lambda b, out: 1 if out["loss"].isnan().any() else 0, nonzero=lambda b, out: b["image"].nonzero(),
    mask=lambda b, out: b["image"][b["image"] > 0], masked_select=lambda b, out: b["image"].masked_select(b["image"] > 0),
    several=lambda b, out: b["image"].clone().index_put_((b["image"] > 0,), b["image"].flatten()[:1].expand(2)[:1].cpu()),
    equal=lambda b, out: torch.equal(b["image"], b["target"]), allclose=lambda b, out: torch.allclose(b["image"], b["target"]),
    unique=lambda b, out: b["image"].unique(), new_tensor=lambda b, out: b["image"].new_tensor(3.0),
    tensor=lambda b, out: torch.tensor(3.0, device=b["image"].device), send=lambda b, out: torch.ones(3).to(b["image"].device))


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_question_is_seen(monkeypatch, name):
    "What the device notes, and where."
    waits, _ = waits_of(monkeypatch, lambda: toy(PLANTS[name]), "fp32")
    assert {w.where.split(":")[0] for w in waits} == {"nbs/tests/test_waits.py", "medlab/step/device.py"}, [*map(str, waits)]


FREE = dict(
    where=lambda b, out: torch.where(b["image"] > 0, b["image"], 0), fill=lambda b, out: b["image"].clone().masked_fill_(b["image"] > 0, 0),
    assign=lambda b, out: b["image"].clone().__setitem__(b["image"] > 0, 0.0), shape=lambda b, out: len(b["image"]) + b["image"].numel(),
    full=lambda b, out: torch.full((3,), 2.0, device=b["image"].device) + b["image"].new_full((), 2.0),
    send=lambda b, out: torch.ones(3).to(b["image"].device, non_blocking=True) + 1, index=lambda b, out: b["image"][torch.arange(2), 0])


@pytest.mark.parametrize("name", FREE)
def test_what_stays_on_the_device_is_free(monkeypatch, name):
    "No false alarm."
    waits, _ = waits_of(monkeypatch, lambda: toy(FREE[name]), "fp32")
    assert {w.where.split(":")[0] for w in waits} == {"medlab/step/device.py"}, [*map(str, waits)]
