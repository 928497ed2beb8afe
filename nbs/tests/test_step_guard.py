"""The same faults in four loops: medlab's trainer, and under `StepGuard` a plain one, Lightning's and MONAI's. One table of outcomes, one set of weights."""
import contextlib
import importlib.util
import logging
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from medlab.core import RunFailed, UserError, generator
from medlab.guards.lightning_guard import lightning_guard
from medlab.guards.monai_guard import MonaiGuard
from medlab.guards.step_guard import StepGuard
from medlab.recipes.base import Recipe
from medlab.train.trainer import Trainer

STEPS, SIZE, LR, SCALE, BAD = 16, 4, 1e-2, 256.0, 5  # BAD: number of the step that is hit, from 0
NAN, STEEP, HOPELESS, FORWARD, BACKWARD = range(1, 6)  # what is wrong with a sample


def losses(out, y, flag):
    "A value for each sample; a fault travels with the sample, so that every loop meets it in the same place."
    if (flag == FORWARD).any() and len(y) > 2: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted on purpose)")
    loss = (out.float() - y).square() * torch.where(flag == STEEP, 1e6, torch.where(flag == HOPELESS, 1e30, 1.0))
    if (flag == BACKWARD).any() and len(y) > 2: loss.register_hook(refuse)
    return loss * torch.where(flag == NAN, math.nan, 1.0)


def refuse(_): raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory (planted on purpose)")


def network(): return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))


@dataclass
class Toy(Recipe):
    "Samples in the order in which they are asked for, with their faults."
    batch_size: int = SIZE
    made = None  # samples; None: others of their kind
    name = "toy"

    def build_model(self): return network()
    def dataset(self): return self.made or [dict(x=torch.zeros(4), y=torch.zeros(()), flag=torch.zeros(()))] * STEPS * SIZE
    def losses(self, model, batch): return dict(loss=losses(model(batch["x"])[:, 0], batch["y"], batch["flag"]))


@dataclass
class Fault:
    "What is planted, and what must come of it."
    flag: int  # 0: nothing
    samples: tuple = (0, 1, 2, 3)  # of the batch
    steps: tuple = (BAD,)
    half: bool = False
    taken: int = STEPS
    dropped: int = 0
    memory: int = 0  # times it ran out
    scale: float = SCALE
    ends: str = None  # in the message of the `RunFailed`
    kept: object = None  # of the batch that is hit, the samples of a clean run; None: all, (): the batch is left out


FAULTS = {"nothing": Fault(0), "nothing in half precision": Fault(0, half=True),
    "a NaN in one sample": Fault(NAN, samples=(2,), dropped=1, kept=(0, 1, 3)),
    "a NaN in one sample in half precision": Fault(NAN, samples=(2,), dropped=1, kept=(0, 1, 3), half=True),
    "a batch of NaN": Fault(NAN, dropped=4, taken=STEPS - 1, kept=()),
    "a batch of NaN in half precision": Fault(NAN, dropped=4, taken=STEPS - 1, kept=(), half=True),
    "a gradient that overflows": Fault(STEEP, half=True, taken=STEPS - 1, kept=(), scale=SCALE / 2),
    "memory in the forward pass": Fault(FORWARD, memory=1), "memory in the backward pass": Fault(BACKWARD, memory=1),
    "memory in the backward pass in half precision": Fault(BACKWARD, memory=1, half=True),
    "every batch NaN": Fault(NAN, steps=tuple(range(BAD, STEPS)), taken=BAD, dropped=40, ends="10 steps in a row were skipped", kept=()),
    "every gradient overflows": Fault(HOPELESS, steps=tuple(range(BAD, STEPS)), half=True, taken=BAD, scale=1.0, ends="10 steps in a row were skipped", kept=())}


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    "Order of the samples, and the first weights, of a trainer."
    with Trainer(Toy(), tmp_path_factory.mktemp("begin") / "run", threads=1, lr=LR) as t:
        return [int(i) for i in t.batches.sampler.order(0)], {k: v.clone() for k, v in t.model.state_dict().items()}


def batches_of(fault):
    "The batches of a loop, with the fault."
    g = generator(0, "samples")
    x, y, flag = torch.randn(STEPS, SIZE, 4, generator=g), torch.randn(STEPS, SIZE, generator=g), torch.zeros(STEPS, SIZE)
    for step in fault.steps: flag[step, list(fault.samples)] = fault.flag
    return [dict(x=a, y=b, flag=c) for a, b, c in zip(x, y, flag)]


def started(begin):
    "Network and optimizer as a trainer has them at the start."
    net = network()
    net.load_state_dict(begin[1])
    return net, torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)


def scaler_of(fault): return torch.amp.GradScaler("cpu", init_scale=SCALE) if fault.half else None
def cast(fault): return torch.autocast("cpu", torch.float16) if fault.half else contextlib.nullcontext()


def mean_loss(net, part, fault):
    "As a loop has it: one number."
    with cast(fault): out = net(part["x"])[:, 0]
    return losses(out, part["y"], part["flag"]).mean()


def clean(begin, fault):
    "The weights of a loop without guard that never saw what is bad."
    net, optimizer = started(begin)
    scaler = scaler_of(fault) or torch.amp.GradScaler("cpu", enabled=False)
    for i, b in enumerate(batches_of(fault)):
        if i in fault.steps and fault.kept is not None: b = {k: v[list(fault.kept)] for k, v in b.items()}
        if not len(b["x"]): continue
        b = {**b, "flag": torch.zeros_like(b["flag"])}
        optimizer.zero_grad()
        scaler.scale(mean_loss(net, b, fault)).backward()
        scaler.step(optimizer)
        scaler.update()
    return net


def row(counts): return {k: counts[k] for k in ("steps", "taken", "skipped", "dropped", "out_of_memory")}


# the four loops: each gives the network, the counts, the scaler

def in_trainer(begin, fault, path, **knobs):
    batches, items = batches_of(fault), [None] * STEPS * SIZE
    flat = [{k: v[j] for k, v in b.items()} for b in batches for j in range(SIZE)]
    for index, item in zip(begin[0], flat): items[index] = item
    recipe = Toy()
    recipe.made = items
    t = Trainer(recipe, path, threads=1, lr=LR, weight_decay=0.0, precision="fp16" if fault.half else "fp32", save_every=0, **knobs)
    t.step.scaler._init_scale = SCALE
    with t:
        with ended(fault): t.fit(STEPS, progress=False)
        skipped, dropped = t.step.iteration - t.step.optimizer_step, int(t.run.metrics("dropped")["dropped"].value.sum())
        counts = dict(steps=t.step.iteration, taken=t.step.optimizer_step, skipped=skipped, dropped=dropped, out_of_memory=len(t.run.events("out_of_memory")))
    return t.model, counts, t.step.scaler


def ended(fault): return pytest.raises(RunFailed, match=fault.ends) if fault.ends else contextlib.nullcontext()


def in_plain_loop(begin, fault, path, **knobs):
    net, optimizer = started(begin)
    scaler = scaler_of(fault)
    guard = StepGuard(net, optimizer, scaler, log=None, **knobs)
    with ended(fault):
        for batch in batches_of(fault): guard.step(lambda part: mean_loss(net, part, fault), batch)
    return net, guard.counts, scaler


def in_lightning(begin, fault, path, **knobs):
    if not importlib.util.find_spec("lightning"): pytest.skip("lightning is not installed; it comes with pip install 'medlab[bench]'")
    import lightning.pytorch as L
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    net, optimizer = started(begin)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
        def training_step(self, batch, batch_idx): return losses(self.net(batch["x"])[:, 0], batch["y"], batch["flag"]).mean()
        def configure_optimizers(self): return optimizer

    scaler, callback = scaler_of(fault), lightning_guard(log=None, **knobs)
    half = [L.plugins.MixedPrecision("16-mixed", "cpu", scaler)] if fault.half else []
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    with ended(fault): L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], plugins=half, **quiet).fit(Module(), torch.utils.data.DataLoader(batches_of(fault), batch_size=None))
    return net, callback.guard.counts, scaler


def in_monai(begin, fault, path, **knobs):
    if not importlib.util.find_spec("ignite"): pytest.skip("ignite is not installed; it comes with pip install 'medlab[bench]'")
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer
    logging.getLogger("ignite").setLevel(logging.CRITICAL)
    net, optimizer = started(begin)
    data = [dict(image=b["x"], label=torch.stack([b["y"], b["flag"]], 1)) for b in batches_of(fault)]
    loss = lambda out, label: losses(out[:, 0], *label.unbind(1)).mean()
    scaler, update = scaler_of(fault), MonaiGuard(log=None, **knobs)
    trainer = SupervisedTrainer(torch.device("cpu"), 1, torch.utils.data.DataLoader(data, batch_size=None), net, optimizer, loss, iteration_update=update, decollate=False)
    trainer.amp, trainer.amp_kwargs = fault.half, dict(dtype=torch.float16)
    trainer.add_event_handler(Events.STARTED, lambda e: setattr(e, "scaler", scaler))
    with ended(fault): trainer.run()
    return net, update.guard.counts, scaler


LOOPS = dict(trainer=in_trainer, plain=in_plain_loop, lightning=in_lightning, monai=in_monai)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", FAULTS)
def test_the_same_fault_has_the_same_end_in_every_loop(begin, tmp_path, name, loop):
    fault = FAULTS[name]
    net, counts, scaler = LOOPS[loop](begin, fault, tmp_path / "run", max_skips=10)
    steps = STEPS if not fault.ends else BAD + 10
    assert row(counts) == dict(steps=steps, taken=fault.taken, skipped=steps - fault.taken, dropped=fault.dropped, out_of_memory=fault.memory)
    if fault.half: assert scaler.get_scale() == fault.scale
    for a, b in zip(net.parameters(), clean(begin, fault).parameters()): assert torch.allclose(a, b, atol=2e-3 if fault.half else 1e-5)


def test_the_faults_end_a_loop_without_a_guard(begin):
    "Else the table above would show nothing."
    def unguarded(fault):
        net, optimizer = started(begin)
        for b in batches_of(fault):
            optimizer.zero_grad()
            mean_loss(net, b, fault).backward()
            optimizer.step()
        return net

    assert all(p.isnan().all() for p in unguarded(FAULTS["a NaN in one sample"]).parameters())
    with pytest.raises(torch.OutOfMemoryError): unguarded(FAULTS["memory in the forward pass"])
    with pytest.raises(RuntimeError, match="can't allocate"): unguarded(FAULTS["memory in the backward pass"])
    bad = clean(begin, FAULTS["every gradient overflows"])
    assert all(p.isfinite().all() for p in bad.parameters())


@pytest.mark.parametrize("half", [False, True])
def test_after_backward_has_the_same_table_but_for_what_only_the_passes_can_know(begin, half):
    "A sample cannot leave any more, so that its batch is skipped; memory that runs out in passes of the loop's own is the loop's."
    for name, fault in FAULTS.items():
        if fault.half != half or fault.memory: continue
        net, optimizer = started(begin)
        scaler = scaler_of(fault)
        guard = StepGuard(net, optimizer, scaler, log=None, max_skips=10)
        with ended(fault):
            for batch in batches_of(fault):
                loss = mean_loss(net, batch, fault)
                (scaler.scale(loss) if scaler else loss).backward()
                guard.after_backward(loss)
        steps = STEPS if not fault.ends else BAD + 10
        assert (guard.counts["steps"], guard.counts["taken"]) == (steps, STEPS - 1 if fault.dropped == 1 else fault.taken), name
        assert all(p.isfinite().all() for p in net.parameters()) and (scaler is None or scaler.get_scale() == fault.scale), name


def test_memory_that_runs_out_while_the_optimizer_moves_cannot_be_taken_back(begin):
    net, optimizer = started(begin)
    guard = StepGuard(net, optimizer, log=None)
    batch, fault = batches_of(FAULTS["nothing"])[0], FAULTS["nothing"]
    hook = optimizer.register_step_post_hook(lambda *a: refuse(None))
    with pytest.raises(RunFailed, match="the optimizer had begun.*load your last checkpoint") as failed: guard.step(lambda part: mean_loss(net, part, fault), batch)
    hook.remove()
    assert not failed.value.whole
    before = optimizer.register_step_pre_hook(lambda *a: before.remove() or refuse(None))
    guard = StepGuard(net, optimizer, log=None)
    report = guard.step(lambda part: mean_loss(net, part, fault), batch)
    assert report.optimizer_step == 2 and guard.counts["out_of_memory"] == 1, "before it has moved anything, it can: also where the optimizer had taken steps before"


def test_a_loop_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *a: 2)
    net = network()
    with pytest.raises(UserError, match="one process, and here 2 train together"): StepGuard(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_the_generators_are_those_of_the_loop(begin):
    "No fault moves the random numbers of what comes after: neither a dropped sample, nor a skip with its diagnosis, nor a retry."
    draws = []
    for name in ("nothing", "a NaN in one sample", "a batch of NaN", "memory in the backward pass"):
        fault = FAULTS[name]
        net = nn.Sequential(*network(), nn.Identity())
        guard = StepGuard(net, torch.optim.AdamW(net.parameters(), lr=LR), log=None)

        def noisy(part):
            noise = torch.rand(())
            return mean_loss(net, part, fault) + 0 * noise

        torch.manual_seed(7)
        for batch in batches_of(fault): guard.step(noisy, batch)
        draws.append(torch.rand(()).item())
    assert draws[0] == draws[1] == draws[2] and draws[3] != draws[0], "in two parts two numbers are drawn"
