"""Checkpoints are written while training goes on: what is in them, what waits for what, and what goes wrong."""
import contextlib
import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_trainer import Toy
from test_validation import Line

from medlab import faults
from medlab.core import UserError
from medlab.run.checkpoint import NotSaved, read_state
from medlab.run.directory import Run
from medlab.train import saving
from medlab.train.ranks import digest
from medlab.train.trainer import Trainer

SLOW = 0.5  # s that a file takes to be written


@pytest.fixture
def make(tmp_path):
    made = []

    def make(recipe=None, name="run", **kw):
        made.append(Trainer(recipe or Toy(pace=0.01), tmp_path / name, threads=1, **kw))
        return made[-1]

    yield make
    for t in made: t.close()


@pytest.fixture
def slow_disk(monkeypatch):
    "Where training was when each file was begun and ended; `trainer` has to be put into it."
    seen, real = dict(trainer=None, begun=[], ended=[], within=0, most=0), torch.save

    def save(state, file):
        seen["within"] += 1
        seen["most"] = max(seen["most"], seen["within"])
        seen["begun"].append(seen["trainer"].iteration)
        time.sleep(SLOW)
        real(state, file)
        seen["ended"].append(seen["trainer"].iteration)
        seen["within"] -= 1

    monkeypatch.setattr(torch, "save", save)
    return seen


def weights(run, step):
    "A digest of all tensors of a kept checkpoint's network and optimizer."
    row = next(c for c in run.checkpoints() if c["step"] == step)
    state = read_state(run.path / "checkpoints" / row["file"], row["sha256"])
    return digest([*state["model"].values(), *(v for s in state["optimizer"]["state"].values() for v in s.values() if torch.is_tensor(v))])


def test_training_goes_on_while_a_checkpoint_is_written(make, slow_disk, monkeypatch):
    "Planted: a disk on which each file takes half a second. Its checkpoint is of the step at which it was begun."
    t = slow_disk["trainer"] = make(save_every=20, keep=9)
    t.fit(30, progress=False)
    assert slow_disk["begun"] == [20, 30] and slow_disk["ended"][0] >= 25, slow_disk
    assert [c["step"] for c in t.run.checkpoints()] == [20, 30]
    assert [e.step for e in t.run.events("checkpoint")] == [20, 30]
    monkeypatch.setattr(saving, "SHARE", 0.0)
    twin = slow_disk["trainer"] = make(name="twin", save_every=20, keep=9)
    twin.fit(30, progress=False)
    assert slow_disk["ended"][2:] == [20, 30], "clean: without room for a copy training waits"
    assert all(weights(t.run, s) == weights(twin.run, s) for s in (20, 30)) and weights(t.run, 20) != weights(t.run, 30)
    words = [e.text for e in twin.run.events("checkpoint") if e.level == "warning"]
    assert len(words) == 1 and "training waits while checkpoints are written" in words[0] and not any(e.level == "warning" for e in t.run.events("checkpoint"))


def test_one_file_at_a_time(make, slow_disk):
    "Planted: a disk that cannot keep up. Training is held to its pace, and every checkpoint is written."
    t = slow_disk["trainer"] = make(save_every=5, keep=9)
    t.fit(15, progress=False)
    assert slow_disk["most"] == 1 and slow_disk["begun"] == [5, 10, 15] == [c["step"] for c in t.run.checkpoints()]
    assert slow_disk["ended"][0] == 10, "the step at which the next was due"
    assert not [x for x in threading.enumerate() if x.name == "medlab checkpoint"]


def test_what_is_asked_for_waits_for_what_is_written(make, slow_disk):
    "A checkpoint that is begun is there for all who ask; going back takes it."
    t = slow_disk["trainer"] = make(Toy(), save_every=5, keep=9)
    t.saver.save_end = lambda state: None
    t.fit(7, progress=False)
    assert t.saver.background.busy and t.saver.kept == [5] and not t.saver.background.busy
    t.fit(until=11, progress=False)
    assert t.saver.background.busy
    t.restore()
    assert t.iteration == 10 and [c["step"] for c in t.run.checkpoints()] == [5, 10, 10]
    t.fit(until=16, progress=False)
    assert t.saver.background.busy
    t.close()
    assert [c["step"] for c in Run(t.path).checkpoints()] == [5, 10, 10, 15]


def test_an_error_that_nobody_foresaw_stops_training(make, monkeypatch):
    "Planted: what cannot be written at all is no full disk. It is told when it happens, also where somebody else waited for it."
    t, real = make(save_every=3), torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: (_ for _ in ()).throw(TypeError("a state of another kind")))
    monkeypatch.setattr(t.loop.between, "flush", lambda flush=t.loop.between.flush: (flush(), t.saver.kept)[0])  # who asks takes no error away
    with pytest.raises(TypeError, match="another kind"): t.fit(20, progress=False)
    assert t.iteration == 6 and t.run.state == "failed" and not t.run.checkpoints()
    told = t.run.events("checkpoint_failed")
    assert [e.step for e in told] == [3, 6] and all("another kind" in e.text for e in told), "and once more at the end"
    monkeypatch.setattr(torch, "save", real)
    assert t.fit(until=9, progress=False).run.checkpoints(), "clean"


@pytest.mark.parametrize("where", ["file", "listener"])
def test_a_file_that_fails_beside_training_is_told_and_not_raised_again(make, monkeypatch, where):
    "Planted: a folder that goes while a file is written, and a step that fails meanwhile. The step's error is the one that is raised, and close() ends in peace."
    t, failed = make(save_every=5), threading.Event()
    def save(*args):
        failed.wait(20)
        raise UserError("the folder is gone")
    if where == "file": monkeypatch.setattr(t.saver.manager, "save", save)
    else: t.saver.saved.append(save)  # of a file that is there
    losses = t.step.losses
    def broken(*args):
        if t.saver.background.busy and t.iteration > 7: failed.set(); raise ZeroDivisionError("of this step")
        return losses(*args)
    t.step.losses = broken
    with pytest.raises(ZeroDivisionError, match="of this step"): t.fit(30, progress=False)
    t.close()
    assert [e.text for e in Run(t.path).events("checkpoint_failed")] == ["the folder is gone"] * (1 + (where == "file")), "the second is of the attempt to save what was learned"


def test_the_best_is_kept_and_noted_once_it_is_written(make, slow_disk):
    "Planted: a process that looks while the best is being written finds the one before."
    t = slow_disk["trainer"] = make(Toy(), save_every=0, save_minutes=60)
    t.saver.worker.ident = threading.get_ident()  # as while something trains
    t.saver.save_meanwhile(dict(step=1, metric="m", value=1.0))
    assert t.saver.background.busy and "best" not in Run(t.path).meta and not t.run.checkpoints()
    t.saver.save_meanwhile(dict(step=2, metric="m", value=2.0))
    t.writer.store.flush()
    assert Run(t.path).meta["best"]["step"] == 1, "the second waited"
    t.saver.background.wait()
    t.writer.store.flush()
    assert Run(t.path).meta["best"]["step"] == 2 and [c["best"] for c in t.run.checkpoints()] == [False, True]
    t.saver.worker.ident = None


class Scored(Line):
    "Better with every validation, but for the third."
    scores = [1.0, 5.0, 3.0, 4.0, 2.0]
    metric = "error"


def test_a_best_that_cannot_be_kept_is_no_measure_for_others(tmp_path):
    "Planted: the disk is full when the best so far is written, or the database when it is marked. The next that beats the one on the disk is kept."
    for name, plan in (("disk", faults.disk_full("checkpoint", at=20)), ("mark", None)):
        with Trainer(Scored(), tmp_path / name, threads=1, val_every_steps=10, val_cases=1, save_every=0, save_minutes=60, keep=9) as t:
            mark, calls = t.saver.manager.mark_best, []

            def refuse(file, keep):
                calls.append(file)
                if len(calls) == 2: raise NotSaved(None, "was not marked")
                return mark(file, keep)

            if name == "mark": t.saver.manager.mark_best = refuse
            step = t.loop.one
            t.loop.one = lambda step=step, t=t: (t.saver.background.idle(), step())[1]  # so that it is told before the next is scored
            with faults.plant(t, plan) if plan else contextlib.nullcontext(): t.fit(50, progress=False)
            best = [c["step"] for c in t.run.checkpoints() if c["best"]]
            told = " ".join(e.text for e in t.run.events("validation"))
            assert best == [40] and t.validation.best["value"] == 4.0 and t.run.state == "done", (best, told)
            assert "the weights of step 20 could not be kept as the best: those of step 10 stay the best" in told and len(t.run.events("checkpoint_failed")) == 1


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), PermissionError(errno.EACCES, "Permission denied")], ids=["stale", "denied"])
def test_a_folder_out_of_reach_for_a_while_ends_nothing(make, monkeypatch, error):
    "Planted: a drive that does not answer when step 10 is to be saved. The run goes on, and is saved at 15."
    t = make(Toy(), save_every=5, keep=9)
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda p: (_ for _ in ()).throw(error) if p.name == "checkpoints" and t.iteration == 10 else real(p))
    t.saver.saved.append(lambda file: None)
    step = t.loop.one
    t.loop.one = lambda: (t.saver.background.idle(), step())[1]  # so that the number of the step is that of the file
    t.fit(15, progress=False)
    assert t.run.state == "done" and [c["step"] for c in t.run.checkpoints()] == [5, 15]
    assert [(e.step, error.strerror in e.text) for e in t.run.events("checkpoint_failed")] == [(10, True)]


def test_a_disk_that_holds_training_is_told_once(make, slow_disk, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SLOW", 1.3)
    t = slow_disk["trainer"] = make(Toy(), save_every=2, keep=9)
    t.fit(8, progress=False)
    told = [e.text for e in t.run.events("checkpoint") if "longer to be written than the steps" in e.text]
    assert len(told) == 1 and "save_every" in told[0]
    t.close()
    with pytest.raises(UserError, match="was closed; go on with"): t.save()


INTERRUPTED = """
import os, signal, sys, threading, time, torch
sys.path.insert(0, {tests!r})
from test_trainer import Toy, Trainer

real, within, most = torch.save, [], []

def save(state, file):
    within.append(1)
    most.append(len(within))
    time.sleep(1.0)
    real(state, file)
    within.pop()

torch.save = save
t = Trainer(Toy(), {path!r}, threads=1, save_every=5, keep=9)
t.saver.save_end = lambda state: None
t.fit(6, progress=False)
assert t.saver.background.busy

def interrupted(call):
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try: call()
    except KeyboardInterrupt: return True

assert interrupted(t.saver.background.wait) and t.saver.background.busy
assert interrupted(t.save), "which waits for the one before"
t.saver.background.wait()
t.saver.background.begin(t.saver._writing(t.state.state_dict()))
assert interrupted(t.close) and t.saver.background.busy and not t.writer.store.closed
t.close()
assert not t.saver.background.busy and t.writer.store.closed and max(most) == 1
u = Trainer(Toy(pace=0.01), {path!r} + "2", threads=1)
u.start(until=150)
assert interrupted(u.wait) and u.worker.alive and "training" in repr(u)
u.wait()
assert u.iteration == 150
u.close()
print("done")
"""


def test_ctrl_c_ends_a_wait_and_no_checkpoint(tmp_path):
    "Planted: interrupts while somebody waits for a checkpoint, for a save, for the end of training. What is under way is known to be, and waited for again."
    code = INTERRUPTED.format(tests=str(Path(__file__).parent), path=str(tmp_path / "run"))
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert made.returncode == 0 and made.stdout.split()[-1] == "done", made.stdout + made.stderr
    run = Run(tmp_path / "run")
    assert {c["file"] for c in run.checkpoints()} == {f.name for f in (tmp_path / "run/checkpoints").iterdir()} and run.checkpoints()[0]["step"] == 5
    assert not run.events("checkpoint_failed")


LEFT = """
import sys, threading, time, torch
sys.path.insert(0, {tests!r})
from test_trainer import Toy, Trainer

real, begun = torch.save, threading.Event()

def save(state, file):
    begun.set()
    time.sleep(3.0)
    real(state, file)

torch.save = save
t = Trainer(Toy(pace=0.01), {path!r}, threads=1, save_every=5).start()
begun.wait()
t.pause()
while t.run.state != "paused": time.sleep(0.01)
assert t.saver.background.busy
"""


def test_a_script_that_ends_while_a_checkpoint_is_written_finishes_it(tmp_path):
    "Planted: the last line comes while a file is written, and training, in a thread that ends with its process, is paused."
    code = LEFT.format(tests=str(Path(__file__).parent), path=str(tmp_path / "run"))
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    kept = [c["step"] for c in Run(tmp_path / "run").checkpoints()]
    assert made.returncode == 0 and kept[:1] == [5], made.stderr


VICTIM = """
import sys, time, torch
sys.path.insert(0, {tests!r})
from test_trainer import Toy, Trainer

real = torch.save

def save(state, file):
    if state["progress"]["iteration"] < 10: return real(state, file)
    file.write(b"half of it")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

torch.save = save
Trainer(Toy(pace=0.01), {path!r}, threads=1, save_every=5).fit(10**6, progress=False)
"""


def test_killed_while_a_checkpoint_is_written(make, tmp_path):
    "Planted: kill -9 in the middle of a file. The one before counts, and what was half written goes."
    code = VICTIM.format(tests=str(Path(__file__).parent), path=str(tmp_path / "run"))
    victim = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert victim.stdout.readline() == "writing\n"
    end = time.monotonic() + 30
    while Run(tmp_path / "run").step < 13: assert time.monotonic() < end; time.sleep(0.02)
    victim.kill()
    victim.wait()
    assert [e.step for e in Run(tmp_path / "run").events("checkpoint")] == [5]
    t = make(resume=True)
    assert t.iteration == 5 and [f.name for f in (t.path / "checkpoints").iterdir()] == ["step_00000005.pt"]
    t.fit(until=12, progress=False)
    assert [c["step"] for c in t.run.checkpoints()] == [5, 10, 12]
