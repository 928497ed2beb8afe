"""What the guards do when something goes wrong in a real trainer: memory that runs out, faults that pass, faults that stay."""
import mmap
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from medlab.core import UserError, generator
from medlab import faults
from medlab.contracts.listener import QuarantineCase
from medlab.contracts.result import Notice
from medlab.cli.main import save_late
from medlab.run.checkpoint import NotSaved
from medlab.core import RunFailed
from medlab.recipes.base import Recipe
from medlab.recipes.table import Table
from medlab.train.trainer import Trainer

CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
ERRORS = {"device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "host": lambda: RuntimeError(CPU), "python": MemoryError}


@dataclass
class Toy(Recipe):
    "Batch statistics, dropout and noise, so that buffers and random state matter."
    batch_size: int = 8
    batch_norm: bool = True
    name = "toy"
    predict_options = dict(tile=(int, None, "side"))

    def build_model(self): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if self.batch_norm else nn.Identity(), nn.SiLU(), nn.Dropout(0.2 if self.batch_norm else 0.0), nn.Linear(8, 1))

    def dataset(self):
        x = torch.randn(64, 4, generator=generator(self.seed, "toy"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i:02}") for i, v in enumerate(x)]

    def prepare(self, batch, seed, step): return {**batch, "x": batch["x"] + 0.01 * torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(seed))}
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))
    def predict(self, model, case, tile=None): return tile
    def evaluate(self, model, cases=None, tile=None): return Table([dict(case="a", tile=float(tile or 0))])


@pytest.fixture
def make(tmp_path):
    "Makes trainers, each in a directory of its own unless it goes on."
    made = []

    def make(name="run", recipe=None, **kw):
        made.append(Trainer(recipe or Toy(), tmp_path / name, threads=1, **({} if kw.get("resume") else dict(lr=1e-2)) | kw))
        return made[-1]

    yield make
    for t in made: t.close()


def bits(trainer, *without):
    "Everything that decides how training goes on, as bytes."
    flat = lambda x: [flat(v) for v in x.values()] if isinstance(x, dict) else [flat(v) for v in x] if isinstance(x, (list, tuple)) else x.numpy().tobytes() if torch.is_tensor(x) else x
    return repr(flat({k: v for k, v in trainer.state.state_dict().items() if k not in ("retry", *without)}))


def scarce(trainer, room, error="device", where="forward", steps=None):
    "Memory for `room` samples at once in one pass of these steps (None: all); the list of sizes that were refused."
    whole, refused = trainer.step.losses, []

    def refuse(n):
        refused.append(n)
        raise ERRORS[error]()

    def losses(model, batch):
        n, out = len(batch["x"]), whole(model, batch)
        if n <= room or (steps is not None and trainer.step.iteration not in steps): return out
        if where == "forward": refuse(n)
        out["loss"].register_hook(lambda g: refuse(n))
        return out

    trainer.step.losses = losses
    return refused


# memory runs out

@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_does_not_fit_is_the_step_of_a_run_with_smaller_micro_batches(make, error, where):
    told = make("told", micro_batch=2, gradient_accumulation_steps=2).fit(12, progress=False)
    t = make("scarce", gradient_accumulation_steps=2)
    refused = scarce(t, 2, error, where)
    t.fit(12, progress=False)
    assert refused == [8, 4] and bits(t) == bits(told), "weights, moments, batch statistics, loss scale, knobs, cursor"
    events, change = t.run.events("out_of_memory"), t.run.changes()
    assert [e.data["after"] for e in events] == [4, 2] and {e.data["where"] for e in events} == {where} and all("came back" in e.text for e in events)
    assert [(c.source, c.new, c.applied_step, c.state) for c in change] == [("oom", dict(micro_batch=2), 1, "applied")] or [c.state for c in change] == ["refused", "applied"]
    s = t.run.metrics("attempted", "taken", "consumed", "samples")
    assert s["attempted"].value[0] == 3 and s["attempted"].value[-1] == 14 and s["taken"].value[-1] == 12 and s["consumed"].value[-1] == 12 * 16 and set(s["samples"].value) == {16}


def test_without_batch_statistics_it_is_the_whole_batch(make):
    whole = make("whole", Toy(batch_norm=False)).fit(20, progress=False)
    t = make("scarce", Toy(batch_norm=False))
    scarce(t, 3)
    t.fit(20, progress=False)
    for a, b in zip(whole.model.parameters(), t.model.parameters()): assert torch.allclose(a, b, atol=1e-4)
    assert t.knobs.micro_batch == 2


def test_a_passing_shortage_is_forgotten_and_a_lasting_one_is_not_tried_for_ever(make):
    t = make(regrow_after=5)
    scarce(t, 4, steps=[3])
    t.fit(12, progress=False)
    assert t.knobs.micro_batch is None and [c.new["micro_batch"] for c in t.run.changes()] == [4, None] and t.run.changes()[1].applied_step == 8
    u = make("lasting", regrow_after=5)
    refused = scarce(u, 4)
    u.fit(60, progress=False)
    assert len(refused) == 4 and u.knobs.micro_batch == 4, "at first, and after 5, 10 and 20 more steps; 40 more are still to come"


def test_what_was_learned_outlives_a_resume_and_replays(make, tmp_path):
    t = make("first")
    scarce(t, 2)
    t.fit(10, progress=False); t.close()
    again = make("first", resume=True).fit(5, progress=False)
    replayed = make("replayed")
    replayed.replay(tmp_path / "first")
    replayed.fit(15, progress=False)
    assert again.knobs.micro_batch == 2 and again.retry.size.asked is None and bits(again) == bits(replayed)


def test_nothing_helps(make):
    t = make(recipe=Toy(batch_norm=False))
    t.fit(3, progress=False)
    before = bits(t, "knobs")
    scarce(t, 0)
    with pytest.raises(RunFailed, match="with 1 sample in a micro-batch"): t.fit(5, progress=False)
    assert bits(t, "knobs") == before and t.iteration == 3 and t.run.state == "failed" and t.run.checkpoints()[-1]["step"] == 3
    t.step.losses = t.recipe.losses
    t.fit(2, progress=False)
    twin = make("twin", Toy(batch_norm=False)).fit(3, progress=False)
    twin.set(micro_batch=1)
    assert bits(twin.fit(2, progress=False)) == bits(t), "its samples were not lost"


def failing_optimizer(trainer, after):
    "The optimizer's next step fails for want of memory, before or after it has moved something."
    whole = trainer.optimizer.step

    def step(*args, **kw):
        trainer.optimizer.step = whole
        if after: whole(*args, **kw)
        raise torch.OutOfMemoryError("planted in the optimizer")

    trainer.optimizer.step = step


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_memory_runs_out_in_the_optimizer(make, precision):
    "Before anything moved the step is made again; after, the run goes back to its checkpoint. Never a second step on top of half a one."
    told = make("told", precision=precision)
    told.fit(5, progress=False)
    told.set(micro_batch=4)
    told.fit(7, progress=False)
    t = make("before", precision=precision).fit(5, progress=False)
    failing_optimizer(t, after=False)
    t.fit(7, progress=False)
    assert bits(t) == bits(told) and t.run.events("out_of_memory")[0].data["where"] == "optimizer"
    whole = make("whole", precision=precision).fit(12, progress=False)
    u = make("after", precision=precision, save_every=3).fit(5, progress=False)
    failing_optimizer(u, after=True)
    u.fit(7, progress=False)
    assert bits(u, "knobs") == bits(whole, "knobs") and [e.level for e in u.run.events("out_of_memory")] == ["error"] and "went back from step 5 to the checkpoint of step 5" in u.run.events("restore")[0].text
    v = make("none", save_every=0)
    failing_optimizer(v, after=True)
    with pytest.raises(RunFailed, match="no checkpoint was written yet"): v.fit(3, progress=False)
    assert not v.run.checkpoints(), "half a step is not saved"
    with pytest.raises(UserError, match="start anew"): v.fit(1, progress=False)


def test_validation_and_prediction_never_end_a_training(make):
    class Heavy(Toy):
        "Fits in tiles of 16."
        image_size = (64, 64)
        def predict(self, model, case, tile=64):
            if tile > 16: raise MemoryError
            return tile
        def evaluate(self, model, cases=None, tile=64): return Table([dict(case="a", tile=float(self.predict(model, "a", tile)))])

    t = make(recipe=Heavy(), val_every_steps=2).fit(4, progress=False)
    assert t.run.metrics("val_tile")["val_tile"].value.tolist() == [16, 16] and t.predict("a") == 16
    t.set(val_retries=1, predict_retries=1)
    t.fit(4, progress=False)
    assert t.run.state == "done" and t.iteration == 8 and len([e for e in t.run.events("validation") if e.level == "error"]) == 2 and len(t.run.metrics("val_tile")["val_tile"].value) == 2
    with pytest.raises(UserError, match="memory ran out in prediction .MemoryError.*the last in tiles of 32; smaller tiles"): t.predict("a")


def test_memory_runs_out_while_a_batch_is_prepared(make):
    whole = make("whole").fit(4, progress=False)
    t, calls = make("scarce"), []
    prepare = t.recipe.prepare

    def once(batch, seed, step):
        calls.append(1)
        if len(calls) == 2: raise MemoryError
        return prepare(batch, seed, step)

    t.recipe.prepare = once
    t.fit(4, progress=False)
    assert bits(t) == bits(whole) and t.run.events("out_of_memory")[0].data["where"] == "data"
    t.recipe.prepare = lambda batch, seed, step: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(RunFailed, match="twice; smaller samples"): t.fit(1, progress=False)


class Interrupt(BaseException): "Not an error of anything in the step."


@pytest.mark.parametrize("where", ["data", "forward", "backward"])
def test_a_step_that_is_interrupted_was_never_made(make, where):
    "Whatever interrupts it, training that goes on afterwards ends in the bits of the run that was not interrupted."
    whole = make("whole", gradient_accumulation_steps=2).fit(8, progress=False)
    t, calls = make("broken", gradient_accumulation_steps=2), []

    def once(*_):
        calls.append(1)
        if len(calls) == 6: raise Interrupt

    prepare, losses = t.recipe.prepare, t.step.losses
    if where == "data": t.recipe.prepare = lambda *a: once() or prepare(*a)
    if where == "forward": t.step.losses = lambda m, b: once() or losses(m, b)
    if where == "backward": t.model[0].weight.register_hook(once)
    with pytest.raises(Interrupt): t.fit(8, progress=False)
    assert t.iteration == 2 and t.batches.samples_seen == 32
    assert bits(t.fit(6, progress=False)) == bits(whole)


REAL = """
import resource, sys, torch
from torch import nn
from dataclasses import dataclass
from medlab.core import generator
from medlab.recipes.base import Recipe
from medlab.train.trainer import Trainer

@dataclass
class Wide(Recipe):
    "32 samples whose activations take about 17 MB each."
    batch_size: int = 32
    name = "wide"
    def build_model(self): return nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv3d(16, 1, 3, padding=1))
    def dataset(self): return [dict(x=torch.randn(1, 32, 32, 32, generator=generator(0, i)), case=str(i)) for i in range(32)]
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["x"]).square().mean((1, 2, 3, 4)))

def address_space(key): return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024

torch.set_num_threads(1)
t = Trainer(Wide(), sys.argv[1], threads=1, lr=1e-3, **(dict(micro_batch=int(sys.argv[3])) if len(sys.argv) > 3 else {}))
size = address_space("VmSize")
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]) * 10**6,) * 2)
t.fit(2, progress=False)
print(t.run.state, t.knobs.micro_batch, len(t.run.events("out_of_memory")), torch.cat([p.detach().flatten() for p in t.model.parameters()]).double().abs().sum().item(), (address_space("VmPeak") - size) // 10**6)
print(t.run.events("out_of_memory")[0].text if t.run.events("out_of_memory") else "", file=sys.stderr)
"""


@pytest.mark.host
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
def test_memory_really_runs_out(tmp_path):
    "The kernel refuses memory to a process whose address space is limited: training finishes, to the bits of a run that was told the size it found."
    def run(*argv):
        out = subprocess.run([sys.executable, "-c", REAL, *map(str, argv)], capture_output=True, text=True, timeout=120)
        assert out.returncode == 0, out.stderr[-2000:]
        return out.stdout.split(), out.stderr

    *_, needed = run(tmp_path / "whole", 0)[0]  # MB; how much a convolution takes differs between processors
    (state, size, events, weights, _), said = run(tmp_path / "scarce", int(0.6 * int(needed)))
    assert state == "done" and int(size) < 32 and int(events) >= 1 and "memory ran out in the " in said and "t allocate memory" in said, said
    assert run(tmp_path / "told", 0, size)[0][:4] == ["done", size, "0", weights]

# faults that stay

def poisoned(trainer, when):
    "The gradient of the first layer is not finite in every step for which `when(trainer)` is true; the steps."
    hit = []

    def hook(g):
        if not when(trainer): return g
        if trainer.step.iteration not in hit[-1:]: hit.append(trainer.step.iteration)
        return g * torch.inf

    trainer.model[0].weight.register_hook(hook)
    return hit


def kinds(trainer): return [e.data["rung"] for e in trainer.run.events("recovery_action")]


def test_a_fault_that_passes_costs_a_step_and_is_explained(make):
    t = make()
    poisoned(t, lambda t: t.step.iteration == 5 and t.step.phase == "backward" and not t.run.events("skip"))
    before = []
    whole = t.step.buffers.restore
    t.step.buffers.restore = lambda: (whole(), before.append([b.clone() for b in t.model.buffers()]))
    t.fit(10, progress=False)
    assert t.step.optimizer_step == 9 and t.iteration == 10 and len(t.run.events("skip")) == 1 and len(t.run.events("diagnosis")) == 1 and not kinds(t)
    assert t.model[1].num_batches_tracked == 9, "a skipped step has moved no statistics, nor has its diagnosis"


def test_a_module_and_a_case_are_named(make):
    t = make(check_loss=False, recipe=Toy(batch_norm=False))
    t.model[4].register_forward_hook(lambda m, args, out: out * torch.where(out == out.max(), torch.nan, 1.0) if m is t.model[4] and t.step.iteration == 3 else out)
    bad = {}
    losses = t.step.losses
    t.step.losses = lambda m, b: bad.setdefault(t.step.iteration, list(b["case"])) and losses(m, b)
    t.fit(4, progress=False)
    found = t.run.events("diagnosis")
    assert len(found) == 1 and found[0].data["module"] == "4" and found[0].data["where"] == "forward" and set(found[0].data["batch"]) == set(bad[3])


class Spoiled(Toy):
    "Two cases that no step can be made with."
    spoiled = 5, 20

    def dataset(self):
        items = super().dataset()
        for i in self.spoiled: items[i]["x"][0] = float("nan")
        return items


def test_every_skipped_step_of_a_logging_interval_is_looked_at_and_its_case_accused(make):
    "Nothing checks inputs or losses, so only a second look can tell; on a device it comes after 24 steps, and two of three skips are old by then."
    t = make(recipe=Spoiled(batch_norm=False), check_inputs=False, check_loss=False, log_every=24, escalate_after=None)
    if hasattr(t.step.decisions, "patience"): t.step.decisions.patience = 1e9
    t.fit(24, progress=False)
    order = [c for e in range(3) for c in t.batches.sampler.order(e)]
    bad = {i // 8 + 1: tuple(f"toy{c:02}" for c in order[i // 8 * 8:i // 8 * 8 + 8] if c in Spoiled.spoiled) for i, c in enumerate(order) if c in Spoiled.spoiled}
    looks, skips = t.run.events("diagnosis"), {e.step: e.data["batch"] for e in t.run.events("skip")}
    rows = {n: v for n, v in bad.items() if n - 1 not in bad}  # one look in a row of skips, as ever
    assert len(rows) > 3 and {e.step: tuple(e.data["cases"]) for e in looks} == rows
    assert {n: [f"toy{c:02}" for c in order[8 * n - 8:8 * n]] for n in bad} == skips, "each case of each of them is named"
    assert all(e.data["where"] == "forward" and e.data["module"] == "0" for e in looks)
    late = {e.step: e.data["late"] for e in looks}
    on_device = type(t.step.decisions).__name__ == "DeviceDecisions"
    assert late == {n: (t.step.optimizer_step - (n - 1 - sum(m < n for m in bad))) if on_device else 0 for n in rows}
    assert all((f"the look was {late[e.step]} optimizer step" in e.text) == bool(late[e.step]) for e in looks)
    assert {c: t.quarantine.cases.count(c) for c in ("toy05", "toy20")} == {c: sum(c in v for n, v in rows.items() if n < 24) for c in ("toy05", "toy20")}


def test_a_case_that_the_step_names_and_the_second_look_accuses_has_one_fault(make):
    "Its loss is not finite by itself: on the device the step is left out for it, and looked at; that is one fault, not two."
    t = make(recipe=Spoiled(batch_norm=False), check_inputs=False, log_every=8, escalate_after=None, case_budget=None)
    t.fit(16, progress=False)
    assert [t.quarantine.cases.count(c) for c in ("toy05", "toy20")] == [2, 2] and t.iteration == 16


def test_a_window_of_bad_data_is_left_out(make):
    "Three steps in a row are skipped: the run goes back to its checkpoint and goes on behind the window, with everything else as it was."
    t = make(escalate_after=3, save_every=4)
    hit = poisoned(t, lambda t: 64 < t.batches.samples_seen <= 64 + 24)
    t.fit(20, progress=False)
    assert hit[:3] == [9, 10, 11] and kinds(t) == ["roll_back"] and "went back from step 11 to 8" in t.run.events("recovery_action")[0].text
    assert (t.iteration, t.step.optimizer_step, t.batches.samples_seen, t.run.state) == (20, 20, 8 * 20 + 24, "done") and (t.run.metrics("loss")["loss"].step == range(1, 21)).all()
    twin = make("twin", save_every=4).fit(8, progress=False)
    twin.batches.samples_seen += 24
    twin.batches.seek(twin.batches.samples_seen)
    assert bits(twin.fit(12, progress=False), "knobs", "escalation", "quarantine") == bits(t, "knobs", "escalation", "quarantine")


def test_a_precision_that_overflows_is_changed_and_stays_changed(make):
    t = make(escalate_after=3, save_every=2, precision="fp16", rollbacks=1, lr_cuts=0, scale_resets=0)
    poisoned(t, lambda t: t.iteration >= 6 and t.knobs.precision == "fp16")
    t.fit(30, progress=False)
    assert kinds(t) == ["roll_back", "change_precision"] and t.knobs.precision == "bf16" and (t.iteration, t.run.state) == (30, "done")
    assert [(c.source, c.new) for c in t.run.changes()] == [("guard", dict(precision="bf16"))] and t.run.changes()[0].verified
    t.escalation.used.clear()
    start = t.batches.samples_seen
    poisoned(t, lambda t: start < t.batches.samples_seen <= start + 24)
    t.fit(10, progress=False)
    assert kinds(t)[2:] == ["roll_back"] and t.knobs.precision == "bf16"
    t.close()
    assert make(resume=True).escalation.used == {"roll_back": 1}


def test_a_fault_that_nothing_mends_ends_with_a_diagnosis(make):
    t = make(recipe=Toy(batch_norm=False), escalate_after=3, max_skips=3, save_every=2, precision="fp16", scale_critical=65536)
    poisoned(t, lambda t: t.iteration >= 6)
    with pytest.raises(RunFailed) as e: t.fit(1000, progress=False)
    assert kinds(t) == ["reset_scale", "roll_back", "roll_back", "change_precision", "change_precision", "lower_lr", "lower_lr"], e.value
    words = str(e.value)
    assert "gradient of '0.weight'" in words and all(w in words for w in ("loss scale was reset", "went back", "fp16 to bf16", "bf16 to fp32", "learning rate is lowered", "every sample"))
    assert t.run.state == "failed" and t.knobs.lr == 2.5e-3 and all(p.isfinite().all() for p in t.model.parameters())
    u = make("off", escalate_after=None, max_skips=4)
    poisoned(u, lambda t: t.iteration >= 6)
    with pytest.raises(RunFailed, match="^4 steps in a row were skipped"): u.fit(1000, progress=False)
    assert not kinds(u) and u.iteration == 10 and u.knobs.lr == 1e-2


@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_case_over_its_budget_is_left_out(make, where):
    class Bad(Toy):
        "Case 5 is poisoned."
        def dataset(self):
            items = super().dataset()
            if where == "input": items[5]["x"][0] = torch.nan
            return items
        def losses(self, model, batch):
            loss = super().losses(model, batch)["loss"]
            return dict(loss=torch.where(torch.tensor([c == "toy05" for c in batch["case"]]), torch.nan, loss) if where == "loss" else loss)

    t = make(recipe=Bad(batch_norm=False)).fit(8 * 5, progress=False)
    events = t.run.events("bad_sample" if where == "input" else "drop")
    assert len(events) == 3 and [e.data["case"] for e in t.run.events("quarantine")] == ["toy05"] and t.step.optimizer_step == 40
    assert where == "input" or t.run.metrics("dropped")["dropped"].value.sum() == 5 and t.run.meta["quarantined"].keys() == {"toy05"}
    t.close()
    u = make(recipe=Bad(batch_norm=False), resume=True).fit(8, progress=False)
    assert len(u.run.events("quarantine")) == 1 and len(u.run.events("bad_sample" if where == "input" else "drop")) == 3
    v = make("never", Bad(batch_norm=False), case_budget=None).fit(8 * 5, progress=False)
    assert len(v.run.events("bad_sample" if where == "input" else "drop")) == 5 and not v.run.events("quarantine")


def test_a_case_that_a_rule_names_is_left_out_though_no_step_failed_with_it(make):
    class Rule:
        "Names a case in the first step."
        seen = []
        def after_step(self, result, batch):
            self.seen += [n for m in batch.micro_batches for n in m.names]
            if result.iteration == 8: return [QuarantineCase("toy05", "my rule", Notice("quarantine", "toy05 is left out"))]

    t, rule = make(recipe=Toy(batch_norm=False)), Rule()
    t.listeners.append(rule)
    t.fit(8 * 3, progress=False)
    assert rule.seen.count("toy05") == 1 and rule.seen.count("toy06") == 3 and len(t.run.events("quarantine")) == 1
    t.close()
    u = make(recipe=Toy(batch_norm=False), resume=True)
    u.listeners.append(rule)
    u.fit(8, progress=False)
    assert rule.seen.count("toy05") == 1 and rule.seen.count("toy06") == 4, "a resumed run leaves it out as well"



@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_false_alarm(make, precision):
    t = make(precision=precision).fit(300, progress=False)
    assert {e.kind for e in t.run.events()} <= {"checkpoint", "sqlite"} | ({"skip", "loss_scale"} if precision == "fp16" else set()), "a loss scale seeks its level"
    assert t.step.optimizer_step >= 290 and t.knobs.precision == precision


# a loss that leads nowhere, a batch that is too small, a scale that is too low

def test_a_run_whose_loss_lets_go_of_the_model(make):
    "At the first step it is the user's mistake. Later it is a skip that names the groups."
    with faults.plant(t := make("first"), faults.no_gradient(at=1)), pytest.raises(UserError, match="group 0 with 6 tensors"): t.fit(3, progress=False)
    twin = make("twin").fit(4, progress=False)
    t = make("passing")
    with faults.plant(t, faults.no_gradient(at=5)):
        t.fit(4, progress=False)
        assert bits(t) == bits(twin)
        t.fit(4, progress=False)
    assert (t.iteration, t.step.optimizer_step, t.run.state) == (8, 7, "done") and [e.step for e in t.run.events("skip")] == [5] and len(t.run.events("no_gradient")) == 1
    e = t.run.events("no_gradient")[0]
    assert e.level == "error" and "group 0 with 6 tensors" in e.text and t.run.events("diagnosis")[0].data["where"] == "none", "made again it was sound"
    u = make("for good", escalate_after=3, max_skips=4, save_every=2)
    with faults.plant(u, faults.no_gradient(at=5, times=None)), pytest.raises(RunFailed, match="^4 steps in a row were skipped, the last because: .*no parameter received a gradient .group 0 with 6 tensors"): u.fit(100, progress=False)
    assert not kinds(u) and u.knobs.lr == 1e-2 and u.run.state == "failed" and len(u.run.events("no_gradient")) == 1, "no rung could mend it"


def test_a_gradient_of_exactly_zero_raises_the_alarm_and_nothing_else(make):
    t = make(zero_alarm=5)
    losses = t.step.losses
    t.step.losses = lambda m, b: {k: v * (0.0 if 3 < t.step.iteration <= 20 else 1.0) for k, v in losses(m, b).items()}
    t.fit(30, progress=False)
    said = t.run.events("no_gradient")
    assert [e.level for e in said] == ["error"] and "step 8: the gradient was exactly zero in 5 steps in a row" in said[0].text and "group 0 with 6 tensors" in said[0].text
    assert t.step.optimizer_step == 30 and not t.run.events("skip")
    u = make("off", zero_alarm=None)
    u.step.losses = lambda m, b: {k: v * 0.0 for k, v in losses(m, b).items()}
    assert not u.fit(30, progress=False).run.events("no_gradient")


def test_a_normalization_with_too_few_samples(make):
    with pytest.raises(UserError, match="1 sample in a micro-batch is too few .*larger batch_size"): make("never", Toy(batch_size=1)).fit(2, progress=False)
    t = make("last", drop_looks=0)
    with faults.plant(t, faults.output("4", at=5, times=7)): t.fit(10, progress=False)  # the first of those that are left, seven times: one is left
    drops = t.run.events("drop")
    assert (t.iteration, t.step.optimizer_step, t.run.state) == (10, 9, "done") and len(t.run.events("skip")) == 1 and t.model[1].num_batches_tracked == 9
    assert "cannot be used alone: Expected more than 1 value per channel" in drops[-1].text and len(drops[-1].data["batch"]) == 1 and not drops[-1].data["cases"], "it is not that case's fault"


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_loss_scale_whose_inverse_is_infinite(make, floor):
    t = make(precision="fp16", scale_floor=floor, escalate_after=4)
    with faults.plant(t, faults.loss_scale(2.0**-140, at=5)): t.fit(16, progress=False)
    low = [e for e in t.run.events("skip") if "a higher scale mends" in e.text]
    assert all(p.isfinite().all() for p in t.model.parameters()) and t.run.state == "done" and [e.step for e in low] == ([5] if floor else [5, 6, 7, 8])
    assert kinds(t) == ([] if floor else ["reset_scale"]) and t.knobs.precision == "fp16"


# what a dropped sample says

def test_the_module_behind_a_dropped_sample_is_named_while_the_budget_lasts(make):
    t = make(recipe=Toy(batch_norm=False), drop_looks=2)
    with faults.plant(t, faults.output("2", at=3, times=2)), faults.plant(t, faults.output("2", at=5, times=1)), faults.plant(t, faults.output("2", at=7, times=1)): t.fit(10, progress=False)
    a, b, c = t.run.events("drop")
    assert a.data["module"] == "2" and "2 (SiLU, float32): 1 of 64 values are not finite" in a.text, "the second look saw it too"
    assert b.data["where"] == "none" and "the fault was transient" in b.text and "module" not in c.data, "two looks in a thousand steps"
    assert t.quarantine.cases.count(a.data["cases"][0]) == 1 and b.data["cases"][0] not in t.quarantine.cases.marks, "what is gone when it is looked for is nobody's fault"


# a disk that is full

def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(make):
    twin = make("twin", save_every=4).fit(16, progress=False)
    t = make("full", save_every=4)
    with faults.plant(t, faults.disk_full("checkpoint", at=8)): t.fit(16, progress=False)
    said = t.run.events("checkpoint_failed")
    assert bits(t) == bits(twin) and t.run.state == "done" and [e.step for e in said] == [8] and said[0].level == "error" and said[0].text.startswith("step 8 was not saved: No space left on device")
    assert [c["step"] for c in t.run.checkpoints()] == [12, 16, 16] or [c["step"] for c in t.run.checkpoints()] == [4, 12, 16]


def test_the_end_of_a_run_that_cannot_be_saved_is_an_error_and_can_be_saved_later(make):
    t = make(save_every=4)
    with faults.plant(t, faults.disk_full("checkpoint", at=6, times=None)), pytest.raises(NotSaved, match="ended at step 6, which could not be saved; the newest checkpoint is of step 4.*save()"): t.fit(6, progress=False)
    assert t.run.state == "failed" and "NotSaved" in t.run.events("error")[0].text and t.iteration == 6
    with faults.plant(t, faults.disk_full("checkpoint", at=1)), pytest.raises(NotSaved, match="No space left"): t.save()  # nothing trains: the user is told at once
    t.save()
    assert t.run.state == "done" and t.saver.checkpoints.newest()[0]["progress"]["iteration"] == 6
    late = make("late", save_every=4)
    with faults.plant(late, faults.disk_full("checkpoint", at=6, times=5)):  # three times in fit, twice after it
        with pytest.raises(NotSaved) as told: late.fit(6, progress=False)
        save_late(late, told.value, pause=0.01)
    assert late.run.state == "done" and late.saver.checkpoints.newest()[0]["progress"]["iteration"] == 6
    u = make("passing", save_every=0)
    with faults.plant(u, faults.disk_full("checkpoint", at=6, times=2)): u.fit(6, progress=False)  # the third attempt at the end
    assert u.run.state == "done" and len(u.run.events("checkpoint_failed")) == 2


def test_a_state_that_cannot_be_written_hides_no_error(make):
    t = make()
    t.writer.store.patience = 0.2
    with faults.plant(t, faults.disk_full("telemetry", at=4, times=None), faults.reader(KeyboardInterrupt("the user's"), index=t.batches.sampler.order(0)[40])) as planted, pytest.warns(RuntimeWarning, match="'failed' of the run could not be written yet"), pytest.raises(KeyboardInterrupt, match="the user's"):
        t.fit(20, progress=False)
    assert len(planted.fired) >= 2 and t.writer.store.flush() and t.run.state == "failed", "it is written once there is room"


def test_what_this_process_asks_for_is_an_event_as_a_command_is(make):
    t = make().start()
    told = lambda: [e.text for e in t.run.events("command")]
    until = lambda wanted: [time.sleep(0.02) for _ in range(500) if told() != wanted]
    t.pause(); until(["pause"])
    t.resume(); until(["pause", "resume"])
    t.run.command("pause"); until(["pause", "resume", "pause"])
    t.run.command("resume"); until(["pause", "resume"] * 2)
    t.stop(); t.wait(20)
    assert told() == ["pause", "resume", "pause", "resume", "stop"] and t.run.state == "stopped"


# memory that is held

def test_a_leak_is_seen_and_named(make):
    class Kept: "Held for no reason."
    t, kept = make(leak_alarm=0.01), []
    for watch in t.memory_watch.leaks: watch.samples = 8
    losses = t.step.losses
    held = lambda: torch.frombuffer(mmap.mmap(-1, 200_000), dtype=torch.uint8).fill_(1)  # new pages: what other tests have freed takes up none of it
    t.step.losses = lambda m, b: kept.append((held(), [Kept() for _ in range(20)])) or losses(m, b)
    t.fit(16 * 24 + 1, progress=False)
    leaks = t.run.events("leak")
    assert leaks and "tensors on the host +" in leaks[0].text and "objects of type" in leaks[0].text and leaks[0].level == "warning", [e.text for e in leaks]


def test_cleanup_is_an_event_and_can_be_switched_off(make):
    t = make(cleanup_seconds=0.0)
    t.manager.tune = lambda *a: t.manager.levels.update(normal=0.01, step=0.01, target=0.01)
    t.fit(40, progress=False)
    assert [e.step for e in t.run.events("memory")] == [1, 17, 33] and "came back" in t.run.events("memory")[0].text
    t.set(cleanup=False)
    t.fit(40, progress=False)
    assert len(t.run.events("memory")) == 3 and "host" in t.manager.log_memory_usage()


@pytest.mark.parametrize("size", [1, 8])
def test_a_network_that_fails_with_every_case_accuses_none(make, size):
    "Its cases are not left out, neither then nor when the network is mended and the run goes on."
    t = make(recipe=Toy(batch_size=size, batch_norm=False), save_every=4)
    with faults.plant(t, faults.output("0", at=10, times=None)), pytest.raises(RunFailed, match="in a row were skipped, the last because: .*no good sample.*in the forward pass 0"): t.fit(400, progress=False)
    assert not t.run.events("quarantine") and not t.quarantine.cases.out
    taken = t.step.optimizer_step
    t.close()
    u = make(recipe=Toy(batch_size=size, batch_norm=False), resume=True).fit(30, progress=False)
    assert u.run.state == "done" and u.step.optimizer_step >= taken + 29 and not u.run.events("quarantine")


def test_a_run_that_diverges_accuses_no_case(make):
    t = make(recipe=Toy(batch_norm=False, optimizer="SGD"), lr=10.0)
    with pytest.raises(RunFailed): t.fit(600, progress=False)
    assert not t.run.events("quarantine") and not t.quarantine.cases.out


def test_cases_that_are_all_left_out_end_the_run_and_can_be_taken_back(make):
    class Moody(Toy):
        "Fails with every case in every other step."
        calls = 0
        def losses(self, model, batch):
            self.calls += 1
            return {k: v * (torch.nan if self.calls % 2 else 1.0) for k, v in super().losses(model, batch).items()}

    t = make(recipe=Moody(batch_norm=False), drop_looks=0)
    with pytest.raises(RunFailed, match="no sample is left to train on: 64 cases are in quarantine, such as toy00 .*case_budget, or None, takes them back"): t.fit(1000, progress=False)
    assert len(t.quarantine.cases.out) == 64 and t.run.state == "failed"
    t.close()
    u = make(recipe=Toy(batch_norm=False), resume=True)
    with pytest.raises(RunFailed, match="no sample is left"): u.fit(20, progress=False)
    u.close()
    v = make(recipe=Toy(batch_norm=False), resume=True, case_budget=None)
    before = v.step.optimizer_step
    assert v.fit(20, progress=False).run.state == "done" and v.step.optimizer_step == before + 20


def test_checkpoints_that_are_out_of_reach_do_not_begin_the_run_anew(make):
    t = make(save_every=4).fit(12, progress=False)
    losses, folder = t.run.metrics("loss")["loss"].value.tolist(), t.path / "checkpoints"
    t.close()
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(UserError, match="none of the 3 checkpoints of .* can be read, such as .*is missing.*; going on would begin at step 0.*bring the checkpoints back"): make(resume=True)
    folder.with_name("elsewhere").rename(folder)
    u = make(resume=True)
    assert u.iteration == 12 and u.run.metrics("loss")["loss"].value.tolist() == losses and len(u.run.checkpoints()) == 3
