"What a step is forecast to take, beside what torch's allocator and the system saw of it in a process of its own."
import gc
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from medlab import recipes
from medlab.cli.main import main
from medlab.core import UserError
from medlab.memory.forecast import PHASES, Ledger
from medlab.memory.timeline import CATEGORIES, _timeline
from medlab.memory.trace import Trace
from medlab.train.forecast import _Counted, _set_up, forecast_recipe

PROGRAM = """
import json, sys, tempfile
import torch
from torch.profiler import ProfilerActivity, profile
from medlab import recipes
from medlab.batches.loader import BatchLoader
from medlab.batches.quarantine import Quarantine
from medlab.memory.savings import set_checkpointing
from medlab.step.schedule import LRSchedule
from medlab.step.step import Step
from medlab.train.forecast import few_phantoms
from medlab.train.state import build_optimizer, build_system
torch.set_num_threads(1)
name, fields, precision, again = json.loads(sys.argv[1])
status = lambda key: next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
cpu, cls = torch.device("cpu"), getattr(recipes, name)
with tempfile.TemporaryDirectory() as folder:
    r = few_phantoms(cls(**{**cls.tiny, **fields}), folder)
    r.knobs = k = cls.Knobs(**{**r.initial_knobs(), "gradient_accumulation_steps": 1, "precision": precision})
    r.setup()
    loader = BatchLoader(r, cpu, k, Quarantine(k))
    loader.seek(0)
    batch = loader.next(1)
before = status("VmRSS:")
held = torch.tensor([v.nbytes for v in batch.micro_batches[0].values() if torch.is_tensor(v)]).sum().item()
system = build_system(r, cpu)
set_checkpointing(system.model, again)
step = Step(system, build_optimizer(r, system.model, k.lr, cpu), r.bind_losses(system), k, LRSchedule(k), r.seed, cpu)
for n in (1, 2): step(n, batch)
size = lambda tensors: sum(t.nbytes for t in tensors)
resident = status("VmHWM:") - before + held
held += size(p for n in system.networks() for p in (*n.parameters(), *n.buffers())) + 2 * size(step.params)
held += size(step.ema.shadow.values()) if step.ema else 0
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p: step(3, batch)
now = peak = 0
for e in p.profiler.kineto_results.events():
    if e.name() == "[memory]":
        now += e.nbytes()
        peak = max(peak, now)
print(json.dumps(dict(allocated=held + peak, resident=resident)))
"""
CELLS = [("SliceInterpolation", dict(channels=(32, 64)), "fp32", False),
    ("Segmentation", dict(image_size=(32, 32, 32), filters=(8, 16, 32)), "bf16", False),
    ("Restoration", dict(image_size=(64, 64), dim=16), "fp32", True)]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux")
@pytest.mark.parametrize("name,fields,precision,again", CELLS)
def test_what_is_forecast_is_what_is_measured(name, fields, precision, again):
    asked = json.dumps([name, fields, precision, again])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, asked], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    real, cls = json.loads(done.stdout.splitlines()[-1]), getattr(recipes, name)
    made = forecast_recipe(cls(**{**cls.tiny, **fields}), device="cpu", fixes=False, precision=precision,
        activation_checkpointing=again, gradient_accumulation_steps=1)
    assert abs(made.expected / real["allocated"] - 1) < 0.10, (made.expected, real)
    assert real["resident"] < made.most, "never 'fits' where it did not"


HEAP = """
import gc, sys, tempfile
from medlab import Trainer, recipes
from medlab.train.forecast import forecast_recipe
for positions in sys.argv[1:]:
    made = recipes.VJEPA3D(**recipes.VJEPA3D.tiny | dict(positions=positions))
    for _ in range(2):
        found = forecast_recipe(made, device="cpu", fixes=False)
        gc.collect()
        filled = [bytearray(n) for n in range(16, 5000, 8)]
        del filled
    with tempfile.TemporaryDirectory() as folder, Trainer(made, folder + "/run", device="cpu", threads=1) as t:
        t.fit(steps=1, progress=False)
        print(found.step.teacher, t.forecast(fixes=False).step.teacher, *t.run.events("skip"))
"""


def test_a_forecast_leaves_the_process_as_it_was():
    "In one of its own: a damaged heap ends it. Tables that are kept are not those of tensors without memory."
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-W", "ignore", "-c", HEAP, "sincos", "rotary", "rotary_public"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in (lines := done.stdout.splitlines()):
        first, again = line.split()
        assert int(first) == int(again) > 0
    assert len(lines) == 3


class Checked(Trace):
    "A trace that notes what the ledger has at each event, too."
    ledger, seen = None, None

    def _event(self, owner=None):
        if self.seen is not None: self.seen.append(self.ledger.now)
        return super()._event(owner)

    def begin(self, *args):
        super().begin(*args)
        self.seen = []


@pytest.fixture(scope="module", params=["FastDDPM", "Restoration", "Segmentation", "SliceInterpolation", "VJEPA3D"])
def step(request, tmp_path_factory):
    cls = getattr(recipes, request.param)
    made, batch = _set_up(cls(**cls.tiny), {}, tmp_path_factory.mktemp("latents"))
    return _Counted(made, batch, "cpu"), made.knobs.micro_batch or made.batch_size


@pytest.mark.parametrize("name", ["FastDDPM", "Restoration", "Segmentation", "SliceInterpolation", "VJEPA3D"])
def test_a_forecast_keeps_no_data(name):
    "As long as it is there: it can make its timeline, and holds neither micro-batch nor cases."
    cls = getattr(recipes, name)
    images = lambda: {id(o) for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu" and o.dim() > 2 and o.shape[-2:] == tuple(recipe.image_size)[-2:]}
    recipe = cls(**cls.tiny)
    before = [gc.collect(), images()][1]
    made = forecast_recipe(recipe, device="cpu", fixes=False)
    gc.collect()
    assert not images() - before and made.least > 0 and made.recount("again")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("again", [False, True])
def test_a_timeline_is_what_the_ledger_counts(step, precision, again, monkeypatch):
    count, n = step
    add = Ledger.add

    def own_add(self, t):
        if self.watch is not None: self.watch.ledger = self
        add(self, t)

    monkeypatch.setattr(Ledger, "add", own_add)
    with Checked() as trace: f = count(n, precision, again, trace=trace)
    made = _timeline(trace)
    kinds = lambda at: dict(zip(CATEGORIES, made.bytes[at].tolist()))
    assert (made.total - made.bytes[:, [*CATEGORIES].index("unfolded by convolutions")] == trace.seen).all()
    assert made.peak == f.peak and [int(made.total[made.phase == i].max()) for i in np.unique(made.phase)] == [
        least for least, _ in f.phases.values()] and made.peak_phase in f.phases
    first, last = kinds(0), kinds(-1)
    assert (first["parameters"], first["optimizer state"], first["average"], first["teacher and frozen"]) == (
        f.parameters, f.moments, f.average, f.teacher + f.frozen) and first["batch and buffers"] == f.others
    assert last["gradients"] == f.gradients and last["activations"] == 0 and last["held after backward"] < 1000
    end = kinds(np.flatnonzero(made.phase == PHASES.index("backward"))[0])["activations"]
    assert abs(end - f.saved) < 0.05 * f.saved + 150_000, "what autograd keeps; the batch is no part of it here"
    named = {k for k, _ in count.recipe.build_system().model.named_modules()}
    assert {m for m in made.modules if "(" not in m} <= named and made.peak == sum(v.sum() for v in made.largest().values())
    assert len(made.largest()) <= 8


def test_a_module_that_hoards_is_named_at_the_peak(monkeypatch):
    tiny = recipes.Segmentation(**recipes.Segmentation.tiny)
    clean = forecast_recipe(tiny, device="cpu", fixes=False, precision="fp32").timeline()
    build = recipes.Segmentation.build_model

    def hoards(self, device=None):
        net = build(self, device)
        block = net.get_submodule(path)
        forward = block.forward
        block.forward = lambda x, *a: setattr(block, "kept", torch.zeros(2_000_000)) or forward(x, *a)
        return net

    path = [m for m in clean.modules if "(" not in m][-1]
    monkeypatch.setattr(recipes.Segmentation, "build_model", hoards)
    made = forecast_recipe(tiny, device="cpu", fixes=False, precision="fp32")
    faulty = made.timeline()
    assert next(iter(faulty.owners())) == path != next(iter(clean.owners())) and path in str(faulty)
    assert "held after backward" in str(faulty) and "held after backward" not in str(clean)
    assert faulty.peak == made.step.peak >= clean.peak + 8_000_000
    monkeypatch.undo()
    with pytest.raises(UserError, match="knobs were changed since"): made.timeline()


@pytest.mark.parametrize("name,step,asked,near", [("Restoration", (8, 8), "0.4GB", 1.0),
    ("VJEPA3D", (2, 8, 8), "0.4GB", 1.05)])
def test_the_largest_patch_fits_and_the_next_does_not(name, step, asked, near):
    cls = getattr(recipes, name)
    count = lambda fields, **kw: forecast_recipe(cls(**{**cls.tiny, **fields}), asked, device="cpu", precision="fp32", **kw)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("medlab.train.forecast.largest_batch", lambda *a: 1)
        m.setattr("medlab.train.forecast._fix_table", lambda *a: {})
        found = count({})
    size = found.patch.size
    assert found.patch.settled and found.patch.counts <= 8 and not found.patch.why
    assert ("largest patch that fits", " × ".join(map(str, size))) in found.rows()
    sized = lambda size: count(dict(image_size=size), fixes=False).most  # as a recipe of that size, with its own data
    assert sized(size) <= near * found.memory < near**2 * sized(tuple(n + g for n, g in zip(size, step)))


OWN = '''
from dataclasses import dataclass
import torch
from medlab.recipes.base import Recipe

@dataclass
class Normed(Recipe):
    "Statistics, and a pass that takes no single sample."
    batch_size: int = 4
    def build_model(self): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    def dataset(self): return [dict(x=torch.full((4,), float(i)), case=f"c{i}") for i in range(16)]
    def losses(self, model, batch): return dict(loss=model(batch["x"]).square().mean(1))

class Lazy(Normed):
    def build_model(self): return torch.nn.LazyLinear(1)

class Growing(Normed):
    def build_model(self): return Grows()

class Grows(torch.nn.Linear):
    def __init__(self): super().__init__(4, 8)
    def forward(self, x):
        if not hasattr(self, "late"): self.late = torch.nn.Linear(8, 1)
        return self.late(super().forward(x))
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = f"of_{tmp_path.name}.py"  # one name for one module of the process
    (tmp_path / file).write_text(OWN)
    return lambda command, name, *words: main([command, f"{file}:{name}", "--device", "cpu", *words])


def test_what_ranks_would_refuse_is_forecast(own, capsys):
    assert own("forecast", "Normed", "--gpus", "2", "--memory", "30GB") == 1
    told = capsys.readouterr().out
    assert told.count("2 ranks refuse it as it is") == 2 and "gradient_accumulation_steps=1 must be at least 2" in told and "1 keeps statistics" in told
    assert "with fsdp on 2 ranks" in told and "on 8 ranks" not in told and re.search("with micro_batch=1 .*not counted: Expected more than 1 value", told)
    assert own("forecast", "Normed", "--processes", "2", "--gradient-accumulation-steps", "2") == 1
    told = capsys.readouterr().out
    assert told.count("refuse it") == 1 and "each of 2 ranks (ddp)" in told
    assert own("forecast", "Normed", "--gpus", "8", "--parallel", "fsdp", "--gradient-accumulation-steps", "8") == 1
    assert "6 tensors are trained, and each rank is to own one" in capsys.readouterr().out
    assert own("forecast", "Normed", "--memory", "1KB") == 1
    told = capsys.readouterr().out
    assert "does not fit" in told and "refuse it" not in told and re.search(r"with fsdp on 8 ranks .* more;", told) and " -" not in told


@pytest.mark.parametrize("name,words,commands", [("Lazy", r"Lazy.build_model\(\) \(.*.py, line 15\) holds a layer that learns its size", ("train", "check", "forecast")),
    ("Growing", r"2 parameters are new since the optimizer was made \(late.weight, late.bias\)", ("train", "check"))])
def test_layers_that_come_with_the_first_pass_are_refused(own, capsys, name, words, commands):
    for command in commands:
        assert own(command, name, *["--steps", "2"] * (command != "forecast")) == 2 and re.search(words, capsys.readouterr().err), command
