"What a step is forecast to take, beside what torch's allocator and the system saw of it in a process of its own."
import json
import os
import subprocess
import sys

import pytest

from medlab import recipes
from medlab.train.forecast import forecast_recipe

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


@pytest.mark.parametrize("positions", ["sincos", "rotary", "rotary_public"])
def test_a_forecast_leaves_the_process_as_it_was(positions):
    "In one of its own: a damaged heap ends it. Tables that are kept are not those of tensors without memory."
    program = f"""
import gc, tempfile
from medlab import Trainer, recipes
from medlab.train.forecast import forecast_recipe
made = recipes.VJEPA3D(**recipes.VJEPA3D.tiny | dict(positions={positions!r}))
for _ in range(3):
    found = forecast_recipe(made, device="cpu", fixes=False)
    gc.collect()
    filled = [bytearray(n) for n in range(16, 5000, 8)]
    del filled
with tempfile.TemporaryDirectory() as folder, Trainer(made, folder + "/run", device="cpu", threads=1) as t:
    t.fit(steps=1, progress=False)
    print(found.step.teacher, t.forecast(fixes=False).step.teacher, *t.run.events("skip"))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    first, again = done.stdout.splitlines()[-1].split()
    assert int(first) == int(again) > 0
