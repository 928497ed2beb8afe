"""A trainer in the hands of people who press every button: nothing hangs, nothing is lost, and every refusal says why."""
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from medlab import faults, recipes
from medlab.core import UserError, generator
from medlab.knobs.knobs import Knobs
from medlab.knobs.traits import Real
from medlab.recipes.base import Recipe
from medlab.run.directory import Run
from medlab.memory.savings import kept_bytes, read_checkpointing
from medlab.train.trainer import Trainer


class ToyKnobs(Knobs):
    norm_eps = Real(1e-5, 0, 1, above=True, help="eps of the normalization").tag(unit="")


@dataclass
class Toy(Recipe):
    "A small regression that takes `pace` seconds per step."
    batch_size: int = 8
    pace: float = 0.0
    Knobs = ToyKnobs

    def build_model(self): return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def dataset(self):
        x = torch.randn(64, 4, generator=generator(self.seed, "toy"))
        return [dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i}") for i, v in enumerate(x)]

    def losses(self, model, batch):
        time.sleep(self.pace)
        return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))

    def apply(self, knob, value, model): model[1].eps = value
    def read(self, knob, model, default): return model[1].eps
    def predict(self, model, case): return model(torch.ones(1, 4))


@pytest.fixture
def make(tmp_path):
    "Makes trainers, in the same directory where none is named, and closes them."
    made = []

    def make(recipe=None, name="run", **kw):
        made.append(Trainer(recipe or Toy(), tmp_path / name, threads=1, **kw))
        return made[-1]

    yield make
    for t in made: t.close()


class Boom(RuntimeError): "Raised on purpose."


def broken(trainer, at):
    "Let the losses raise at one call."
    whole, calls = trainer.step.losses, []

    def losses(model, batch):
        calls.append(1)
        if len(calls) == at: raise Boom
        return whole(model, batch)

    trainer.step.losses = losses


# one thing at a time

def test_training_runs_once(make):
    t = make(Toy(pace=0.01))
    for first in (lambda: t.start(), lambda: threading.Thread(target=t.fit, args=(10**6,), kwargs=dict(progress=False)).start()):
        first()
        while not t.worker.busy.locked(): time.sleep(0.01)
        for again in (lambda: t.start(steps=3), lambda: t.fit(3, progress=False)):
            with pytest.raises(UserError, match="training runs already"): again()
        t.stop()
        with t.worker.busy: pass
    with pytest.raises(UserError, match="held by a live trainer"): make()
    with pytest.raises(UserError, match="held by a live trainer"): make(resume=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_steps_are_whole(make, steps):
    with pytest.raises(UserError, match="must be an integer ≥ 1"): make().fit(steps)


@pytest.mark.parametrize("thread", ["worker", "own"])
def test_close_while_training_saves(make, thread):
    t, errors = make(Toy(pace=0.01)), []

    def fit():
        try: t.fit(10**6, progress=False)
        except BaseException as e: errors.append(e)

    t.start() if thread == "worker" else threading.Thread(target=fit).start()
    while t.iteration < 3: time.sleep(0.01)
    t.close(); t.close()
    run = Run(t.path)
    assert not errors and run.state == "stopped" and run.checkpoints()[-1]["step"] == run.step == t.iteration
    with pytest.raises(UserError, match="was closed"): t.fit(1)


def test_pause_before_start_and_after_stop(make):
    t = make()
    t.pause()
    t.start(steps=3)
    time.sleep(0.2)
    assert (t.iteration, t.run.state) == (0, "paused")
    t.resume(); t.wait(20)
    t.pause(); t.start(); t.stop(); t.wait(20)
    assert t.start(steps=2).wait(20).run.state == "done", "a pause ends with its training"


def test_predict_while_training(make):
    t = make(Toy(pace=0.002), ema=0.9).start()
    assert all(torch.isfinite(t.predict("x")).all() for _ in range(30)) and t.model.training
    t.stop(); t.wait(20)
    assert t.run.state == "stopped"


# knobs

def test_the_last_of_many_requests_counts(make):
    "A slider sends more requests than there are steps."
    t, asked = make(Toy(pace=0.01)).start(), []
    threads = [threading.Thread(target=lambda k=k: asked.extend(t.set(lr=1e-5 * (1 + i + k), norm_eps=1e-4) for i in range(50))) for k in range(4)]
    for x in threads: x.start()
    for x in threads: x.join()
    last = t.set(lr=7e-4).wait(20)
    for c in asked: c.wait(20)
    t.stop(); t.wait(20)
    assert last.verified and t.knobs.lr == 7e-4 and t.run.metrics("lr")["lr"].value[-1] == 7e-4
    assert {c.state for c in t.run.changes()} == {"applied", "refused"} and not t.run.events("revert")
    assert all("asked for again" in c.reason for c in asked if c.state == "refused")


def test_knobs_that_live_elsewhere_hold_from_the_start_and_after_a_resume(make):
    state = lambda t: (t.knobs.norm_eps, t.model[1].eps, t.knobs.weight_decay, t.optimizer.param_groups[0]["weight_decay"])
    t = make(norm_eps=0.25)
    assert state(t) == (0.25, 0.25, 0, 0), "AdamW's own default is no decay of ours"
    t.set(norm_eps=0.5, weight_decay=0.1)
    t.fit(2, progress=False); t.close()
    t = make(resume=True)
    assert state(t) == (0.5, 0.5, 0.1, 0.1)
    t.saver.save_end = lambda state: None  # as if it had been killed
    t.set(norm_eps=0.125); t.fit(1, progress=False); t.close()
    t = make(resume=True)
    assert state(t) == (0.5, 0.5, 0.1, 0.1) and t.fit(1, progress=False) and t.model[1].eps == 0.125, "the change after the checkpoint is made again"


@pytest.mark.parametrize("name", ["FastDDPM", "Restoration", "Segmentation"])
def test_checkpointing_changes_memory_and_no_bit(make, name):
    "Switched on, off and on again while it trains, over a stop."
    def weights(t): return [p.detach().clone() for p in t.model.parameters()]

    def kept(t):
        batch = t.batches.next(1).micro_batches[0]
        return kept_bytes(lambda: t.recipe.losses(t.model, batch)["loss"].sum(), t.model)

    recipe = lambda: (cls := getattr(recipes, name))(**{**cls.tiny, "batch_size": 2})
    plain = make(recipe()).fit(4, progress=False)
    bits = weights(plain)
    plain.close()
    t = make(recipe(), "switched", activation_checkpointing=True)
    t.set(at=2, activation_checkpointing=False)
    t.set(at=3, activation_checkpointing=True)
    t.fit(3, progress=False).close()
    t = make(recipe(), "switched", resume=True)
    assert read_checkpointing(t.model) and t.fit(1, progress=False) and all(map(torch.equal, bits, weights(t)))
    assert [(c.new, c.verified) for c in t.run.changes()] == [(dict(activation_checkpointing=False), True), (dict(activation_checkpointing=True), True)]
    less = kept(t)
    assert t.fixes["activation_checkpointing"].off().state == "pending" and t.fit(1, progress=False) and less < 0.8 * kept(t)


def test_checkpointing_of_networks_that_have_it_or_cannot(make):
    @dataclass
    class Built(Toy):
        def build_model(self):
            net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
            net.use_checkpoint = True  # as MONAI's networks have it
            return net

    t = make(Built(), "built")
    assert t.knobs.activation_checkpointing and t.model.use_checkpoint, "what the network was built with stays"
    assert not make(Built(), "off", activation_checkpointing=False).model.use_checkpoint, "unless it was asked otherwise"
    with pytest.raises(UserError, match="Sequential has no block whose activations could be computed again"): make(Toy(), "never", activation_checkpointing=True)
    t = make(Toy(), "toy")
    assert not (t.path.parent / "never").exists()
    t.set(activation_checkpointing=True)
    assert t.fit(2, progress=False).run.changes()[0].state == "reverted" and not t.knobs.activation_checkpointing


@pytest.mark.host
def test_a_recipe_of_ones_own_goes_on_in_a_process(make, monkeypatch):
    "Its module is found where this process finds it; a run directory that this user did not make makes nobody import it."
    t = make().fit(2, progress=False)
    run = t.start(process=True, until=40)
    end = time.monotonic() + 60
    while run.state != "done": assert time.monotonic() < end and run.state not in ("failed", "killed"), (run.path / "process.log").read_text(); time.sleep(0.05)
    assert run.step == 40 and run.meta["recipe"][:2] == ["test_trainer", "Toy"]
    Trainer.open(run.path).close()
    monkeypatch.setenv("XDG_STATE_HOME", str(run.path))
    with pytest.raises(UserError, match="not one of medlab's: the run was made by another user or elsewhere"): Trainer.open(run.path)


def test_weight_decay_that_the_optimizer_lacks(make):
    t = make(Toy())
    for g in t.optimizer.param_groups: del g["weight_decay"]
    t.optimizer.step = lambda: None
    change = t.set(weight_decay=0.1)
    t.fit(2, progress=False)
    assert change.state == "reverted" and "has no weight_decay" in change.reason

    change = t.set(weight_decay_end=0.1)
    t.fit(1, progress=False)
    assert change.state == "reverted" and "has no weight_decay" in change.reason and t.knobs.weight_decay_end is None


def test_a_weight_decay_with_a_schedule_goes_on_to_the_bit(make):
    "Over a stop, a kill after the checkpoint, and requests before and after it; where no schedule moves it, nothing is recorded."
    knobs = dict(lr=1e-2, weight_decay=0.04, weight_decay_end=0.4, horizon=20, save_every=0)
    bits = lambda t: torch.cat([p.detach().flatten() for p in t.model.parameters()])

    def ask(t): t.set(at=5, weight_decay=0.2); t.set(at=11, weight_decay=0.1)

    whole = make(name="whole", **knobs)
    ask(whole)
    whole.fit(16, progress=False)
    t = make(**knobs)
    ask(t)
    t.fit(8, progress=False).close()
    t = make(resume=True)
    t.saver.save_end = lambda state: None  # as if it had been killed
    t.fit(4, progress=False).close()
    t = make(resume=True).fit(8, progress=False)
    seen, other = t.run.metrics("weight_decay")["weight_decay"], whole.run.metrics("weight_decay")["weight_decay"]
    assert torch.equal(bits(t), bits(whole)) and seen.value.tolist() == other.value.tolist() and seen.step.tolist() == list(range(1, 17))
    assert seen.value[0] == 0.04 and seen.value[4] == 0.2 and seen.value[10] == 0.1 and all(c.verified for c in whole.run.changes())
    off = whole.set(weight_decay_end=None)
    whole.fit(2, progress=False)
    assert off.verified and whole.optimizer.param_groups[0]["weight_decay"] == 0.1 == whole.knobs.weight_decay
    assert whole.run.metrics("weight_decay")["weight_decay"].step.max() == 16
    change = whole.set(weight_decay=0.3, weight_decay_end=0.5, norm_eps=1e-3)
    whole.recipe.read = lambda knob, model, default: 1.0  # so that it is taken back
    whole.fit(2, progress=False)
    assert change.state == "reverted" and whole.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_weight_decay_that_is_no_value_is_refused(make):
    for bad in (-0.1, 11, float("nan"), "much", True):
        with pytest.raises(UserError, match="weight_decay_end=.* is refused: it must be a finite number in .0, 10. or None .off."): make(name="bad", weight_decay_end=bad)
    with pytest.raises(UserError, match="LBFGS"): make(Toy(optimizer="LBFGS"), "bad", weight_decay_end=0.1)
    assert not (make().path.parent / "bad").exists()


def test_rubbish_from_another_process(make):
    t = make(Toy(pace=0.01)).start()
    run = Run(t.path)
    for text in ("[1]", '{"lr": []}', '{"lrr": 1}'): run._db.execute("INSERT INTO changes(time, source, requested, state) VALUES(0, 'x', ?, 'pending')", (text,))
    run._db.execute("INSERT INTO commands(time, source, name, state) VALUES(0, 'x', 'dance', 'pending')")
    run.request(at="soon", lr=1e-5)
    good = run.request(lr=2e-5)
    end = time.monotonic() + 20
    while run.changes()[-1].state == "pending": assert time.monotonic() < end; time.sleep(0.02)
    assert [c.state for c in run.changes()] == ["refused"] * 4 + ["applied"] and run.changes()[-1].id == good and t.knobs.lr == 2e-5
    with pytest.raises(UserError, match="at='soon' must be the number of a step"): t.set(at="soon", lr=1e-5)


def test_what_another_asked_for_before_holds_from_the_first_step(make):
    "Also where the thread that looks for requests is slow."
    t = make().fit(1, progress=False)
    run, store = Run(t.path), t.writer.store
    look = store._look
    store._look = lambda: (time.sleep(0.1), look())
    for i in range(8):
        run.request(lr=2e-5 * (i + 1))
        t.fit(1, progress=False)
    assert t.run.metrics("lr")["lr"].value.tolist()[1:] == [2e-5 * (i + 1) for i in range(8)]
    assert [c.applied_step for c in run.changes()] == list(range(2, 10))


def test_a_stop_for_a_trainer_that_is_gone_does_not_stop_the_next(make):
    t = make()
    t.fit(1, progress=False); t.close()
    Run(t.path).command("stop")
    t = make(resume=True)
    time.sleep(0.2)
    t.fit(4, progress=False)
    assert (t.iteration, t.run.state) == (5, "done")


# resume

def test_a_finished_run_goes_on_with_other_knobs(make):
    make(lr=1e-2).fit(3, progress=False).close()
    t = make(resume=True, lr=1e-4, gradient_accumulation_steps=3).fit(2, progress=False)
    assert t.run.metrics("lr")["lr"].value.tolist() == [1e-2] * 3 + [1e-4] * 2 and t.run.metrics("samples")["samples"].value[-1] == 24


def test_another_recipe_is_refused_or_told(make):
    make().fit(3, progress=False).close()
    with pytest.raises(UserError, match="another optimizer than SGD"): make(Toy(optimizer="SGD"), resume=True)
    with pytest.raises(UserError, match="the run has seed 0, the recipe 3"): make(Toy(seed=3), resume=True)
    t = make(Toy(batch_size=4), resume=True)
    assert "batch_size 8 → 4" in t.run.events("config")[0].text
    t.recipe.batch_size = 5
    t.fit(1, progress=False)
    assert t.batches.samples_seen == 3 * 8 + 4 and t.last["dropped"] == 0, "what counts is the batch that was loaded"


# faults

def test_an_exception_in_the_worker_is_raised_once_and_leaves_no_gradient(make):
    t = make(gradient_accumulation_steps=2)
    broken(t, at=4)
    t.start(steps=10)
    with pytest.raises(Boom): t.wait(20)
    assert t.run.state == "failed" and "Boom" in t.run.events("error")[0].text and all(p.grad is None for p in t.model.parameters())
    assert t.start(steps=2).wait(20).iteration == 3
    broken(t, at=1)
    t.start(steps=1).worker.thread.join()
    assert t.start(steps=2).wait(20).run.state == "done", "an error nobody waited for is not raised by the next training"


class Mistaken(Toy):
    "A mistake of the user's own, in one step."
    broken = 0

    def losses(self, model, batch):
        if self.broken and self.trainer.iteration + 1 == self.broken: raise self.error
        return super().losses(model, batch)


@pytest.mark.parametrize("error", [KeyError("label"), SystemExit("enough")])
def test_a_mistake_in_the_recipe_loses_no_step(make, error):
    recipe = Mistaken()
    recipe.error, recipe.broken, recipe.trainer = error, 8, (t := make(recipe, save_every=5))
    with pytest.raises(type(error)) as e: t.fit(20, progress=False)
    assert isinstance(error, SystemExit) or "the run is saved as of step 7" in e.value.__notes__, e.value.__notes__
    t.close()
    recipe.broken = 0
    again, whole = make(recipe, resume=True), make(Toy(), "whole")
    assert again.iteration == 7
    for t, steps in ((again, 13), (whole, 20)): t.fit(steps, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters()))


def test_a_mistake_within_the_optimizer_is_not_saved(make):
    t = make(save_every=5)
    t.fit(7, progress=False)

    def torn():
        "Move something, then fail."
        with torch.no_grad(): t.model[0].weight.add_(1)
        raise KeyError("moment")

    t.optimizer.step = torn
    with pytest.raises(KeyError) as e: t.fit(1, progress=False)
    assert [c["step"] for c in t.run.checkpoints()] == [5, 7] and "the run is saved as of step 7" in e.value.__notes__, "nothing is written since"
    t = make(name="unsaved")
    whole, t.optimizer.step = t.optimizer.step, lambda: torn() if t.iteration == 3 else whole()
    with pytest.raises(KeyError) as e: t.fit(9, progress=False)
    assert "no step of the run is saved: the weights may be half moved, or are lost" in e.value.__notes__ and not t.run.checkpoints()


class Moving(Mistaken):
    "Weights that the losses move themselves, before they fail; or a layer that a later pass makes."
    late = 0

    def losses(self, model, batch):
        at = self.trainer.iteration + 1
        if at == self.broken: torch.nn.init.ones_(model[0].weight)
        if at == self.late: model.add_module("late", torch.nn.Linear(1, 1))
        return super().losses(model, batch)


def test_weights_that_the_losses_moved_before_they_failed_are_not_saved(make):
    "Planted: the whole weights of step 7 are gone, so step 5 stays the newest. Where nothing fails nothing is refused."
    recipe = Moving()
    recipe.error, recipe.broken, recipe.trainer = KeyError("label"), 8, (t := make(recipe, save_every=5))
    with pytest.raises(KeyError) as e: t.fit(20, progress=False)
    assert [c["step"] for c in t.run.checkpoints()] == [5]
    assert "the run is saved as of step 5; what was learned in the 2 steps since then is not: the weights may be half moved, or are lost" in e.value.__notes__


@pytest.mark.parametrize("late,saved,ends", [(4, [], 5), (7, [5], 10), (12, [5, 10], 12)])
def test_a_layer_that_a_later_pass_makes_is_refused_before_it_is_saved(make, late, saved, ends):
    recipe = Moving()
    recipe.late, recipe.trainer = late, (t := make(recipe, save_every=5))
    with pytest.raises(UserError, match=r"2 parameters are new since the optimizer was made \(late.weight, late.bias\)") as caught: t.fit(12, progress=False)
    assert [c["step"] for c in t.run.checkpoints()] == saved and t.iteration == ends and t.run.state == "failed"
    assert [n for n in caught.value.__notes__ if "it would not load into the network that build_model() makes" in n]
    t.close()
    recipe.late = 0
    assert make(recipe, resume=True).iteration == (saved or [0])[-1]


L = lambda m, b: (m(b["x"]) - b["y"]).square().mean(1)


@pytest.mark.parametrize("losses,words", [
    (lambda m, b: L(m, b), "returned Tensor"), (lambda m, b: dict(mse=L(m, b)), "the key 'loss'"), (lambda m, b: dict(loss=L(m, b).mean()), "each of the 8 samples"),
    (lambda m, b: dict(loss=L(m, b)[:3]), "of shape .3,."), (lambda m, b: dict(loss=L(m, b), mse=1.0), "is a float"), (lambda m, b: dict(loss=L(m, b).detach()), "does not depend on the model")])
def test_losses_that_are_none(make, losses, words):
    t = make()
    t.step.losses = losses
    with pytest.raises(UserError, match=words): t.fit(1, progress=False)


def test_parts_that_come_and_go_stay_in_their_columns(make):
    t = make(Toy())
    t.step.losses = lambda m, b: dict(loss=L(m, b), **({"part": L(m, b).detach() * 0 + t.step.iteration} if t.step.iteration % 3 == 0 else {}))
    t.batches.batches = iter([_empty(), next(t.batches.batches), _empty(), *(next(t.batches.batches) for _ in range(30))])
    t.fit(20, progress=False)
    s = t.run.metrics("part", "loss", "lr", "skipped")
    assert s["part"].step.tolist() == s["part"].value.tolist() == [6, 9, 12, 15, 18] and s["loss"].step.tolist() == [*range(1, 21)]
    assert s["skipped"].value.tolist() == [1, 0, 1] + [0] * 17 and set(s["lr"].value[3:]) == {s["lr"].value[1]} == {1e-3}


def _empty():
    from medlab.batches.loading import Collated, Fault
    return Collated(None, [], [Fault("toy", "unreadable")] * 8)


def test_an_empty_dataset(make, tmp_path):
    recipe = Toy()
    recipe.dataset = lambda: []
    with pytest.raises(UserError, match="holds no sample"): make(recipe)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_deleted_while_training(make):
    t = make(Toy(pace=0.002), save_every=5).start()
    while t.iteration < 3: time.sleep(0.01)
    shutil.rmtree(t.path)
    with pytest.raises((FileNotFoundError, UserError)): t.wait(20)
    t.close()


INTERRUPTED = """
import signal, sys; sys.path.insert(0, {tests!r})
from test_trainer import Toy, Trainer
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
t = Trainer(Toy(pace={pace}), {run!r}, threads=1)
losses, stop = t.step.losses, t.stop
t.step.losses = lambda *a: print("step", flush=True) or losses(*a)
t.stop = lambda: print("heard", flush=True) or stop()
try: t.fit(10**6, progress=False)
except KeyboardInterrupt: print("interrupted")
t.recipe.pace, t.step.losses = 0, losses
print(t.run.state, len(t.run.checkpoints()), t.fit(2, progress=False).run.state)
"""


@pytest.mark.host
@pytest.mark.parametrize("pace,times,expected", [(0.01, 1, "interrupted\nstopped 1 done"), (3.0, 2, "interrupted\nfailed 0 done")], ids=["once", "twice"])
def test_ctrl_c(tmp_path, pace, times, expected):
    "The first stops between two steps, saves and interrupts, the second interrupts at once; then it can go on."
    code = INTERRUPTED.format(tests=str(__file__).rsplit("/", 1)[0], pace=pace, run=str(tmp_path / "run"))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for word in ("step", "heard")[:times]:
        while process.stdout.readline() != f"{word}\n": assert process.poll() is None
        time.sleep(0.2)  # whoever said so has gone on meanwhile
        process.send_signal(signal.SIGINT)
    said = [l for l in process.communicate(timeout=60)[0].splitlines() if l not in ("step", "heard")]
    assert "\n".join(said) == expected


# what a script of a stranger meets

SCRIPT = """
import signal, sys; sys.path.insert(0, {tests!r})
from test_trainer import *
signal.signal(signal.SIGINT, signal.default_int_handler)
{body}
"""


def script(tmp_path, body):
    "A script in a process of its own, without a terminal."
    code = SCRIPT.format(tests=str(__file__).rsplit("/", 1)[0], body=body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


class Broken(Toy):
    "Its loss is the logarithm of what is never positive."

    def losses(self, model, batch): return dict(loss=(-model(batch["x"]).abs() - 1).log().mean(1))


class Odd(Toy):
    "One of its samples gives a loss that is not finite."

    def losses(self, model, batch):
        odd = torch.tensor([c in ("toy3", "toy5") for c in batch["case"]])[:, None]
        return dict(loss=torch.where(odd, torch.nan, model(batch["x"]) - batch["y"]).square().mean(1))


@pytest.mark.host
def test_a_loss_that_is_never_finite_ends_a_script_with_its_reason(tmp_path, capsys):
    "Planted: 20 steps of NaN. The run ends with an error after five of them, the same name is free for the mended script, and nothing is lost."
    process = script(tmp_path, "with Trainer(Broken(), 'run', threads=1) as t: t.fit(20)")
    out, err = process.communicate(timeout=250)
    last = err.splitlines()[-1]
    assert process.returncode == 1 and not out and last.startswith("medlab.core.RunFailed: 5 steps in a row were skipped, and none was ever taken: "), err
    assert "the loss itself" in last and "every sample of the batch is at fault (toy" in last and "(x + 1e-6).log()" in last
    run = Run(tmp_path / "run")
    assert run.state == "failed" and run.step == 5 and not run.checkpoints(), "weights that never moved are nothing to be saved"
    with Trainer(Toy(), tmp_path / "run", threads=1) as t: t.fit(3)
    assert capsys.readouterr().err.replace(str(tmp_path), "…") == ("medlab: warning: an earlier attempt in …/run never took a step; what it wrote is in …/run.empty-1 now, "
        "and this run begins anew\n")
    assert Run(tmp_path / "run").state == "done" and Run(tmp_path / "run.empty-1").events("error") and not Run(tmp_path / "run").events("error")
    assert Run(tmp_path / "run").events("earlier_attempt")[0].data == dict(moved_to=str(tmp_path / "run.empty-1"))


def test_a_loss_that_is_never_finite_goes_on_where_that_is_asked_for(make, capsys):
    t = make(Broken(), max_first_skips=None)
    t.fit(8, progress=False)
    assert t.run.step == 8 and t.step.optimizer_step == 0
    assert "medlab: error: not one of the steps 1 to 8 was taken, so nothing was learned; Run(" in capsys.readouterr().err, "never in silence"
    with pytest.raises(RuntimeError, match="5 steps in a row were skipped, and none"): make(Broken(), "late").fit(6)


@pytest.mark.host
def test_a_script_without_a_terminal_is_told_what_happens(tmp_path):
    "Each warning once, and what repeats it as a count."
    out, err = script(tmp_path, "with Trainer(Odd(), 'run', threads=1, case_budget=None, drop_looks=0) as t: t.fit(48)").communicate(timeout=250)
    drops, lines = len(Run(tmp_path / "run").events("drop")), err.splitlines()
    assert not out and drops > 8 and len(lines) == 2 and all("gave a non-finite loss for toy" in l for l in lines), err
    assert lines[0].startswith("medlab: warning: step ") and lines[1].startswith(f"medlab: warning: {drops - 1} more like it, the last: step ")


def test_who_is_told_what_happens(make, capsys, monkeypatch):
    "Off with progress=False, where only errors are left, and of a worker thread in a notebook."
    t = make(Odd(), "quiet", case_budget=None)
    t.fit(16, progress=False)
    assert t.run.events("drop") and not capsys.readouterr().err
    t.fit(16)
    assert "non-finite loss" in capsys.readouterr().err
    t.start(steps=16).wait(20)
    assert "non-finite loss" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    t.start(steps=16).wait(20)
    monkeypatch.undo()
    t.writer.event("store", "a warning when nothing trains", "warning")
    make(name="clean").fit(16)
    assert not capsys.readouterr().err, "clean, and in a notebook what a worker thread meets is on the panel"


def test_warnings_pass_a_progress_bar_and_are_the_same_with_lines(make, capsys):
    for name, progress in (("bar", True), ("lines", "lines")):
        make(Odd(), name, drop_looks=0).fit(16, progress=progress)
        err = capsys.readouterr().err
        assert [l for l in err.replace("\r", "\n").splitlines() if l.startswith("medlab: warning: step ")], err


def test_one_checkpoint_for_a_step(make):
    "Planted: the last step is one of save_every's, and the best so far."
    t = make(save_every=5, keep=9)
    t.fit(10, progress=False)
    files = [c["file"] for c in t.run.checkpoints()]
    assert [c["step"] for c in t.run.checkpoints()] == [5, 10] and len(files) == len({*files}) == len(t.run.events("checkpoint"))
    t.fit(2, progress=False)
    assert [c["step"] for c in t.run.checkpoints()] == [5, 10, 12], "clean: an end between two saves is saved"
    t.start(); t.pause()
    while t.run.state != "paused": time.sleep(0.01)
    at = t.iteration
    t.stop(); t.wait(20)
    assert [c["step"] for c in t.run.checkpoints()].count(at) == 1
    assert t.save() and [c["step"] for c in t.run.checkpoints()].count(at) == 2, "who asks gets one"


def timed(t, pace):
    "Let every step of a trainer take `pace` seconds by the clock of its saver."
    t.saver.clock = lambda: pace * t.iteration
    return t


def saved(t): return [int(e.text.split()[1]) for e in t.run.events("checkpoint")]


def test_a_long_step_is_saved_by_time(make):
    "Planted: steps of four minutes, 200 of which would be saved. Clean: the same steps within a second each, and with time off. All end in the same bits."
    slow, quick, off = (timed(make(name=n, keep=9, **kw), pace).fit(10, progress=False)
        for n, pace, kw in (("slow", 240.0, {}), ("quick", 1.0, {}), ("off", 240.0, dict(save_minutes=0))))
    assert saved(slow) == [3, 6, 9, 10] and saved(quick) == saved(off) == [10]
    for t in (quick, off): assert all(torch.equal(a, b) for a, b in zip(slow.model.parameters(), t.model.parameters(), strict=True))
    slow.saver.save_end = lambda state: None  # as if it had been killed
    slow.fit(4, progress=False); slow.close()
    t = make(name="slow", resume=True)
    assert t.iteration == 13 and t.knobs.save_minutes == 10.0


def test_no_checkpoint_means_none_by_time_either(make):
    "Planted: save_every=0, and steps of an hour. With a save_minutes beside it the time alone counts; a change while it trains is what it says."
    assert saved(timed(make(name="none", save_every=0), 3600.0).fit(4, progress=False)) == [4]
    t = timed(make(name="time", save_every=0, save_minutes=90, keep=9), 3600.0).fit(5, progress=False)
    assert saved(t) == [2, 4, 5] and t.knobs.save_minutes == 90
    t = timed(make(name="changed", save_every=2, save_minutes=0, keep=9), 3600.0)
    assert t.set(save_every=0, at=4) and t.set(save_minutes=60, at=6)
    assert saved(t.fit(8, progress=False)) == [2, 6, 7, 8]
    with pytest.raises(UserError, match="save_minutes=-1"): make(name="odd", save_minutes=-1)


def test_a_full_disk_is_not_tried_at_each_step(make):
    "Planted: nothing can be written for a while; ten minutes later it is tried again."
    t = timed(make(save_every=0, save_minutes=10, keep=9), 240.0)
    with faults.plant(t, faults.disk_full("checkpoint", at=2, times=1)): t.fit(8, progress=False)
    assert len(t.run.events("checkpoint_failed")) == 1 and saved(t) == [6, 8]


def test_an_older_run_has_no_save_minutes(make):
    "Planted: a run and its checkpoint without the knob, one of which had save_every=0."
    for name, every, minutes in (("some", 3, 10.0), ("none", 0, 0.0)):
        t = make(name=name, save_every=every)
        values = t.knobs.values
        t.state.parts["knobs"].state_dict = lambda: {k: v for k, v in values().items() if k != "save_minutes"}
        t.fit(2, progress=False); t.close()
        t = make(name=name, resume=True)
        assert (t.iteration, t.knobs.save_every, t.knobs.save_minutes) == (2, every, minutes)
        assert f"save_minutes={minutes}" in " ".join(e.text for e in t.run.events("config"))
        t.fit(1, progress=False); t.close()


@pytest.mark.host
def test_ctrl_c_ends_a_script_with_two_trainings(tmp_path):
    "Planted: one Ctrl-C in the first of two. Neither the second one, nor anything behind the first, runs; the state is saved."
    body = """
for name in ("first", "second"):
    t = Trainer(Toy(pace=0.01), name, threads=1)
    t.fit(10**6, progress="lines")
print("the end")"""
    process = script(tmp_path, body)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    run = Run(tmp_path / "first")
    assert process.returncode in (1, 130, -signal.SIGINT) and "the end" not in out and not (tmp_path / "second").exists()
    assert err.splitlines()[-1] == f"KeyboardInterrupt: training stopped after step {run.step}, which was saved; fit() goes on"
    assert run.state == "stopped" and run.checkpoints()[-1]["step"] == run.step


@pytest.mark.host
def test_sigterm_saves_and_ends_the_script(tmp_path):
    process = script(tmp_path, "t = Trainer(Toy(pace=0.01), 'run', threads=1)\nt.fit(10**6, progress='lines')\nprint('the end')")
    process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=250)
    assert process.returncode == 143 and "the end" not in out and Run(tmp_path / "run").state == "stopped"
    assert err.startswith("medlab: stopping after this step") and err.count("\n") == 1, err


def test_an_attempt_without_a_step_may_be_begun_anew(make, tmp_path):
    "Planted: an error in the first batch. With a step taken the run is refused, and the message names every way on."
    class Mistaken(Toy):
        def losses(self, model, batch): return dict(loss=model(batch["image"]))

    for i in (1, 2):
        t = make(Mistaken())
        with pytest.raises(KeyError): t.fit(3, progress=False)
        with pytest.raises(UserError, match="is held by a live trainer"): make()
        t.close()
        assert (tmp_path / f"run.empty-{i - 1}").exists() == (i > 1)
    t = make()
    t.fit(1, progress=False)
    t.close()
    with pytest.raises(UserError, match="holds a run already, of 1 steps; go on with it .resume=True.*choose another name, or remove"): make()
    make(resume=True).fit(1, progress=False)
    said = [Run(tmp_path / f"run.empty-{i}").events("error")[0].text.splitlines() for i in (1, 2)]
    assert [text[0] for text in said] == ["KeyError: 'image'"] * 2 and all("in losses" in text[1] for text in said)


def test_another_configuration_is_said(make, capsys):
    "Planted: a run that goes on with another batch size. The clean one says nothing."
    for batch_size, words in ((8, ""), (4, "medlab: warning: the recipe is not the stored one: batch_size 8 → 4\n")):
        t = make(Toy(batch_size=batch_size), resume=bool(words))
        t.fit(2, progress=False)
        t.close()
        assert capsys.readouterr().err == words
    make(Toy(batch_size=8), resume=True)
    assert not capsys.readouterr().err


class WarmKnobs(ToyKnobs):
    warmth = Real(0.5, 0, 1, help="of nothing").tag(unit="")


@dataclass
class Warm(Toy):
    "The same with a field and a knob more."
    depth: int = 3
    Knobs = WarmKnobs
    def read(self, knob, model, default): return default if knob == "warmth" else super().read(knob, model, default)
    def apply(self, knob, value, model): None if knob == "warmth" else super().apply(knob, value, model)


def test_what_is_new_in_a_recipe_is_said_once_and_what_is_gone_too(make, capsys):
    "Planted: a field and a knob that came, and that went. A recipe that stayed says nothing."
    make().fit(2, progress=False).close()
    t = make(Warm(), resume=True)
    new = [e for e in t.run.events("config")]
    assert capsys.readouterr().err == "medlab: info: new since this run was made: depth=3, warmth=0.5\n"
    assert [(e.level, e.data) for e in new] == [("info", dict(new=dict(depth=3, warmth=0.5)))]
    t.close()
    make(Warm(), resume=True).close()
    assert capsys.readouterr().err == "", "once, also before another checkpoint was written"
    make(Warm(depth=4), resume=True).fit(1, progress=False).close()
    assert capsys.readouterr().err == "medlab: info: new since this run was made: depth=4\n", "another value is"
    make(Warm(), name="warm").fit(1, progress=False).close()
    t = make(Warm(), name="warm", resume=True, warmth=0.25)
    t.fit(2, progress=False)
    t.set(warmth=0.75, lr=1e-4)
    t.fit(1, progress=False).close()
    assert not capsys.readouterr().err, "clean"
    t = make(name="warm", resume=True)
    assert capsys.readouterr().err == "medlab: warning: the recipe is not the stored one: depth=3 is no field any more, warmth=0.75 is no knob any more\n"
    assert t.fit(1, progress=False).iteration == 5 and t.knobs.lr == 1e-4


def test_a_run_in_the_working_directory_is_not_moved_from_under_it(make, tmp_path, monkeypatch):
    "Planted: --run . where an earlier attempt never took a step. Nothing is moved or lost, and it goes on where steps were taken."
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make(name="here").close()
    (tmp_path / "here/mine.py").write_text("x = 1")
    for name in (".", tmp_path / "here"):
        with pytest.raises(UserError, match="earlier attempt that never took a step.*name another run directory"): Trainer(Toy(), name, threads=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"] and (tmp_path / "here/mine.py").exists()
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")
    with Trainer(Toy(), ".", threads=1) as t: t.fit(1, progress=False)
    with Trainer(Toy(), ".", resume=True, threads=1) as t: assert t.fit(1, progress=False).iteration == 2 and Path("run.db").exists()


@pytest.mark.parametrize("place", ["taken", "live", "file/run"])
def test_the_place_is_looked_at_before_the_data(make, tmp_path, place):
    "Planted: a directory that cannot be used. No sample is read for it."
    read = []

    class Reading(Toy):
        def setup(self, split=None):
            read.append(1)
            return super().setup(split)

    (tmp_path / "file").write_text("")
    live = make(name="live")
    t = make(name="taken")
    t.fit(1, progress=False)
    t.close()
    with pytest.raises(UserError, match="holds a run already|held by a live trainer|cannot be written: Not a directory"): make(Reading(), place)
    assert not read
    make(Reading(), "new/run")
    assert read and live.iteration == 0


def test_steps_that_come_again_are_said(make):
    "A run that was killed says at its resume how many steps were not saved; without any checkpoint that is a warning."
    told = lambda t: [(e.level, e.text) for e in t.run.events("resume")][-1]
    t = make(save_every=0)
    t.saver.save_end = lambda state: None  # as if it had been killed
    t.fit(3, progress=False); t.close()
    t = make(resume=True)
    assert told(t) == ("warning", "going on after step 0 (no checkpoint was written); 3 steps that were made after it come again: of the knobs save_every=0 (steps) and save_minutes=0, smaller ones above 0 lose fewer")
    t.fit(2, progress=False); t.close()
    t = make(resume=True)
    assert told(t) == ("info", "going on after step 2"), "nothing was lost"
    t.saver.save_end = lambda state: None
    t.fit(4, progress=False); t.close()
    t = make(resume=True)
    level, text = told(t)
    assert level == "info" and text.startswith("going on after step 2; 4 steps"), text
    t.close()
