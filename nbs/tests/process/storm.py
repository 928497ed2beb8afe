"""Random faults that pass, spread over a run."""
import contextlib
import random
from dataclasses import dataclass

import torch
from toys import Toy, trainer
from torch import nn

from medlab.core import generator
from medlab import faults


@dataclass
class Steady(Toy):
    "128 samples and no batch statistics: a step that is made again in smaller parts because memory ran out is then the same step, but for its dropout."

    def build_model(self): return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def dataset(self):
        x = torch.randn(128, 4, generator=generator(self.seed, "steady"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"steady{i:03}") for i, v in enumerate(x)]


KINDS = {
    "input": lambda at, draw: faults.batch(draw.choice("xy"), at=at, value=draw.choice([float("nan"), float("inf"), -float("inf")])),
    "output": lambda at, draw: faults.output(draw.choice(["0", "1", "2", "4"]), at=at),
    "gradient": lambda at, draw: faults.gradient(draw.choice(["0.weight", "1.bias", "4.weight"]), at=at, value=draw.choice([float("nan"), float("inf")])),
    "no gradient": lambda at, draw: faults.no_gradient(at=at),
    "memory": lambda at, draw: faults.out_of_memory(draw.choice(["forward", "backward", "optimizer"]), at=at, kind=draw.choice(["gpu", "cpu", "host"])),
    "disk": lambda at, draw: faults.disk_full(draw.choice(["telemetry", "checkpoint"]), at=at),
    "clock": lambda at, draw: faults.clock(draw.choice([-3600, 3600]), at=at),
}


def plans(steps, share, seed=0):
    "A fault in this share of the steps, of a random kind."
    draw = random.Random(seed)
    return [KINDS[draw.choice(list(KINDS))](at, draw) for at in range(3, steps - 20) if draw.random() < share]


def run(path, steps, share=0.0, seed=0, **knobs):
    "Train through a storm, or through none; what became of it."
    with trainer(path, Steady(seed=seed), save_every=20, lr=1e-2, **knobs) as t:
        with faults.plant(t, *plans(steps, share)) if share else contextlib.nullcontext() as planted: t.fit(until=steps, progress=False)
        kinds = [e.kind for e in t.run.events()]
        last = t.run.metrics("loss")["loss"].value[-200:]
        whole = all(bool(torch.isfinite(p).all()) for p in t.model.state_dict().values())
        return dict(taken=t.step.optimizer_step, number=t.iteration, state=t.run.state, fired=len(planted.fired) if planted else 0, whole=whole, loss=float(last[last == last].mean()),
            events={k: kinds.count(k) for k in dict.fromkeys(kinds) if k not in ("checkpoint", "planted", "sqlite")}, left_out=len(t.quarantine.cases.out) + len(t.quarantine.samples.out))
