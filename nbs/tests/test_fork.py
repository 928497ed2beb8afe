"""A fork: the bits of its parent in every recipe and precision, whatever is killed meanwhile, and clear words for what cannot be forked."""
import contextlib
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from victim import KNOBS, Small, digest

from medlab import recipes
from medlab.cli.main import main
from medlab.core import UserError
from medlab.faults.outages import damage
from medlab.forks.fork import fork_run
from medlab.forks.replay import replay_fork
from medlab.run.checkpoint import read_state, sha256
from medlab.run.directory import Run, run_or_fault
from medlab.run.store import connect
from medlab.train.trainer import Trainer

HERE = Path(__file__).parent
KILLS = int(os.environ.get("MEDLAB_KILLS", 8))  # 50 for the long test
RECIPES = dict(fast_ddpm=recipes.FastDDPM, restoration=recipes.Restoration, segmentation=recipes.Segmentation)


def train(recipe, path, until, **knobs):
    "Train a run, new or going on; the hash of everything that decides how it goes on."
    with Trainer(recipe, path, resume=(path / "run.db").exists(), threads=1, **knobs) as trainer:
        trainer.step.scaler._init_scale = 16.0  # of a new run: with torch's 65,536 the first steps would all be skipped
        trainer.fit(until=until, progress=False)
        assert trainer.step.optimizer_step, "something was learned"
        return digest(trainer.state.state_dict())


def files_of(path):
    "The bytes of everything in a run directory, but for what SQLite keeps there while somebody reads."
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file() and not p.name.endswith(("-shm", "-wal"))}


def curves(path, stop=None):
    "What was recorded of every step, but for what a clock measures."
    clock = ("time", "mem_gb", "samples_per_s", "elapsed", "attempted")
    found = Run(path).metrics(stop=stop)
    return {k: (s.step.tolist(), s.value.tobytes()) for k, s in found.items() if len(s) and not k.endswith(clock)}


@pytest.fixture
def small(tmp_path):
    "A run of six steps, saved at the second, the fourth and the last."
    train(Small(), tmp_path / "first", 6, **KNOBS, save_every=2)
    return tmp_path / "first"


def refused(words, run, *args, **kw):
    "Forking is refused with these words, and leaves nothing behind."
    there = sorted(p.name for p in Path(run).parent.iterdir())
    with pytest.raises(UserError) as e: fork_run(run, *args, **kw)
    assert words in str(e.value) and sorted(p.name for p in Path(run).parent.iterdir()) == there, e.value


# the same bits

@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_fork_without_a_change_is_its_parent(tmp_path, name, precision):
    cls = RECIPES[name]
    made = lambda: cls(**cls.tiny | (dict(image_size=(8, 8, 8)) if name == "fast_ddpm" else {}))
    parent = train(made(), tmp_path / "first", 4, precision=precision, ema=0.9, gradient_accumulation_steps=2, save_every=2, schedule="cosine", horizon=4, val_share=0.0)
    before = files_of(tmp_path / "first")
    fork = fork_run(tmp_path / "first", 2, name="fork")
    assert curves(fork.path) == curves(tmp_path / "first", 2)
    if precision == "fp32": fork = fork_run(fork_run(fork, 2, name="of-a-fork"), name="of-a-fork-of-a-fork")
    assert train(made(), fork.path, 4) == parent and curves(fork.path) == curves(tmp_path / "first")
    assert [a["step"] for a in fork.lineage] == [2] * (3 if precision == "fp32" else 1)
    assert files_of(tmp_path / "first") == before, "not a byte of the parent"


def test_with_loading_processes(tmp_path):
    made = lambda: recipes.Restoration(**recipes.Restoration.tiny, workers=1)
    parent = train(made(), tmp_path / "first", 3, save_every=2)
    assert train(made(), fork_run(tmp_path / "first", 2, name="fork").path, 3) == parent


def test_of_a_run_that_another_process_trains(tmp_path):
    "Its trainer is asked for a checkpoint, and trains on; so is one that pauses. After kill −9 the newest is forked, and both go on to the same bits."
    path = tmp_path / "first"
    process = subprocess.Popen([sys.executable, HERE / "victim.py", path, "1"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"): break
    live = fork_run(path, "now", name="live")
    run = Run(path)
    run.command("pause")
    while run.state != "paused": time.sleep(0.01)
    paused = fork_run(path, "now", name="paused")
    assert run.state == "paused" and live.step < paused.step == run.step
    run.command("resume")
    while run.step < paused.step + 5: time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = fork_run(path, "now", name="killed")
    assert run.state == "killed" and killed.step == run.checkpoints()[-1]["step"]
    until = run.step + 3
    ends = {train(Small(), p, until) for p in (live.path, paused.path, killed.path, path)}
    assert len(ends) == 1, "nothing that forking did is seen in any of them"


def test_a_run_is_seen_going_from_its_first_step(tmp_path):
    "Also on a disk that takes a second for a commit: a fork `now` that is asked for in the first step finds a trainer."
    seen = []
    with Trainer(Small(), tmp_path / "run", threads=1, **KNOBS) as trainer:
        one, commit = trainer.loop.one, trainer.writer.store._commit
        def step():
            with contextlib.closing(Run(tmp_path / "run")) as run: seen.append(run.state)
            return one()
        def slowly():
            time.sleep(1)
            commit()
        trainer.loop.one, trainer.writer.store._commit = step, slowly
        trainer.fit(until=2, progress=False)
    assert seen == ["running", "running"]


def test_changes_come_along(tmp_path):
    "What was applied before is history, what was asked for before is asked for, and what the parent changed later is its own affair."
    with Trainer(Small(), tmp_path / "first", threads=1, **KNOBS, save_every=2) as trainer:
        trainer.set(at=2, lr=1e-3)
        trainer.set(at=5, clip_norm=0.5)
        trainer.fit(until=4, progress=False)
        trainer.set(lr=1e-5)
        trainer.fit(until=6, progress=False)
    fork = fork_run(tmp_path / "first", 4, dict(weight_decay=0.1), name="fork")
    assert [(c.requested, c.state, c.at, c.applied_step) for c in fork.changes()] == [
        (dict(lr=1e-3), "applied", 2, 2), (dict(clip_norm=0.5), "pending", 5, None), (dict(weight_decay=0.1), "pending", 5, None)]
    train(Small(), fork.path, 6)
    assert [(c.requested, c.applied_step, c.source) for c in fork.changes()[1:]] == [
        (dict(clip_norm=0.5), 5, "api"), (dict(weight_decay=0.1), 5, "fork of first at step 4")]
    assert fork.events("change")[-1].data["source"] == "fork of first at step 4"
    values = fork.metrics("lr")["lr"].value
    assert values[1] == Run(tmp_path / "first").metrics("lr")["lr"].value[1] and values[4] > 1e-4


def test_a_crash_repeats_the_change(small):
    "A fork that dies after its change was applied and before it was saved makes the change again."
    forks = [fork_run(small, 4, dict(lr=1e-4), name=name) for name in ("whole", "dies")]
    whole = train(Small(), forks[0].path, 8)
    with Trainer(Small(), forks[1].path, resume=True, threads=1) as trainer:
        trainer.saver.save_end = lambda state: None  # as if it had been killed before it could save
        trainer.saver.due = lambda: False
        trainer.fit(until=6, progress=False)
    assert Run(forks[1].path).checkpoints()[-1]["step"] == 4 and train(Small(), forks[1].path, 8) == whole


def test_of_a_line_that_was_left(tmp_path):
    "After the run went back to step 2 the checkpoint of step 4 belongs to another history, and its fork has that one."
    small = tmp_path / "first"
    train(Small(), small, 6, **KNOBS, save_every=2, keep=9)
    left = curves(small, 4)
    with Trainer(Small(), small, resume=True, threads=1) as trainer:
        trainer.restore(2)
        trainer.set(lr=1e-5)
        trainer.fit(until=3, progress=False)
        trainer.saver.due = lambda: False
        trainer.saver.save_end = lambda state: None
        trainer.fit(until=5, progress=False)
    fork = fork_run(small, 4, name="fork")
    assert curves(fork.path) == left != curves(small, 4)
    with pytest.raises(UserError, match="exists already"): replay_fork(small, 4, name="fork", cls=Small)
    assert curves(replay_fork(small, 5, name="again", cls=Small).path, 5) == curves(small, 5), "from step 3, not from 4"


def test_of_an_older_run(tmp_path):
    "Its names are read as those of today, and what it had asked for by then is asked for in the fork."
    path = shutil.copytree(HERE / "fixtures/run_v1", tmp_path / "run")
    fork = fork_run(path, knobs=dict(check_inputs=True, accumulate=2), name="fork")
    assert fork.step == 20 and fork.lineage[0]["knobs"] == dict(check_inputs=True, gradient_accumulation_steps=2)
    with Trainer.open(fork.path, device="cpu", threads=1) as trainer:
        trainer.fit(steps=1, progress=False)
        assert trainer.knobs.gradient_accumulation_steps == 2 and trainer.iteration == 21
    assert [c.source for c in fork.changes() if c.applied_step == 21] == ["fork of run at step 20"]


# kills

def test_kills_leave_no_half_fork(small):
    before = files_of(small)
    done = subprocess.run([sys.executable, HERE / "forker.py", small, str(KILLS), "0"], capture_output=True, text=True, timeout=250)
    assert done.stdout == "done\n", done.stderr[-2000:]
    found = [run_or_fault(p.parent) for p in small.parent.glob("*/run.db")]
    names = {r.name for r in found}
    assert "renamed" in names and not names & {"link", "files", "curves", "changes", "told", "rename"}
    assert {r.name for r in Run.list(small.parent)} == names
    whole = train(Small(), small.with_name("whole"), 6, **KNOBS, save_every=2)
    for run in found:
        assert [c["step"] for c in run.checkpoints()][-1] == (6 if run.name == "first" else 4)
        for c in run.checkpoints(): read_state(run.path / "checkpoints" / c["file"], c["sha256"])
        assert run.name == "first" or curves(run.path) == curves(small, 4)
    last = max((r for r in found if r.name.startswith("kill")), key=lambda r: r.meta["created"], default=Run(small.with_name("renamed")))
    for name in ("link", "rename"): fork_run(small, 4, name=name)
    assert {train(Small(), p, 6) for p in (last.path, small.with_name("rename"))} == {whole}
    assert files_of(small) == before
    print(f"{KILLS} kills at random times and 7 at stages: {len(found) - 1} whole forks")


# what cannot be forked

def copied(path, name):
    "Another run directory with files of its own."
    shutil.copytree(path, path.with_name(name))
    return path.with_name(name)


def test_damage(small):
    first, second = copied(small, "first-damage"), copied(small, "second-damage")
    damage(first / "checkpoints/step_00000006.pt")
    refused("checkpoint step_00000006.pt is damaged", first, 6)
    older = fork_run(first, name="older")
    assert older.step == 4 and "is damaged" in older.events("checkpoint")[-1].text
    for c in Run(second).checkpoints(): damage(second / "checkpoints" / c["file"])
    refused("use an older one; first-damage has older ones that are whole: steps 2, 4", first, 6)
    refused("is damaged", second)
    damage(second / "run.db", how="truncate")
    refused("run.db", second)


@pytest.mark.parametrize("state,words", [(dict(format=3), "has format 3, and this medlab reads 1 and 2"), (dict(format=2), "is no checkpoint of a trainer"),
    (dict(step=1), "is no checkpoint of a trainer"), ([1], "is no checkpoint of a trainer")], ids=str)
def test_checkpoints_of_others(small, state, words):
    file = small / "checkpoints/step_00000006.pt"
    torch.save(state, file)
    db, _ = connect(small / "run.db")
    db.execute("UPDATE checkpoints SET sha256=? WHERE step=6", (sha256(file),))
    db.close()
    refused(words, small, 6)


def test_runs_of_others(small):
    db = sqlite3.connect(small / "run.db")
    db.execute("PRAGMA user_version=2")
    db.close()
    refused("was written by a later medlab", small)
    with pytest.raises(UserError, match="no run directory"): fork_run(small.with_name("none"))
    db = sqlite3.connect(small / "run.db")
    db.executescript("PRAGMA user_version=1; CREATE VIEW odd AS SELECT 1")
    db.close()
    refused("is no run of medlab", small)


@pytest.mark.parametrize("options,words", [
    ("--at 5", "the nearest: 4 and 6"), ("--at 99", "step 99 was not made yet"), ("--at soon", "must be the number of a step, now or newest"),
    ("--set lrr=1", "unknown knob 'lrr'"), ("--set lr=20", "lr=20 is refused: it must be a finite number in (0, 10]"), ("--set lr", "not of the form name=value"),
    ("--fix fp3", "unknown fix of first 'fp3'"), ("--fix fp32", "the fix 'fp32' is on already at step 6"), ("--fix ema --set lr=1e-4", "give one of the two"),
    ("--run {run}", "is the run itself"), ("--run {run}/x", "lies within the run"), ("--run {run}/..", "exists already"), ("--rum x", "unknown option '--rum'")])
def test_the_command_refuses(small, options, words):
    there, err = sorted(p.name for p in small.parent.iterdir()), io.StringIO()
    with contextlib.redirect_stderr(err): status = main(["fork", str(small), "--run", str(small.with_name("x")), *options.replace("{run}", str(small)).split()])
    assert status == 2 and words in err.getvalue() and err.getvalue().count("\n") == 1, err.getvalue()
    assert sorted(p.name for p in small.parent.iterdir()) == there


def test_the_command(small):
    out = io.StringIO()
    with contextlib.redirect_stdout(out): status = main(["fork", str(small), "--at", "4", "--set", "lr=2e-4", "--run", str(small.with_name("new"))])
    assert status == 0 and "lr 0.003 → 0.0002 from step 5" in out.getvalue() and f"medlab train --resume {small.with_name('new')}" in out.getvalue()
    assert Run(small.with_name("new")).step == 4
