"""kill -9 at random moments, also while a run starts or goes on: nothing that was acknowledged is lost, and it can always go on."""
import multiprocessing
import os
import random
import shutil
import sqlite3
import time
from pathlib import Path

from toys import events, trainer

from medlab.core import UserError
from medlab.run.checkpoint import read_state
from medlab.run.directory import Run

KILLS = int(os.environ.get("MEDLAB_KILLS", 8))  # 200 for the long test


def opened(path):
    "A trainer on the run, from wherever it stands; whether it had to begin anew."
    try: return trainer(path, resume=(Path(path) / "run.db").exists(), save_every=5), False
    except UserError as e:
        if "holds no run yet" not in str(e): raise
        shutil.rmtree(path)  # killed before there was a run: so it says
        return trainer(path, save_every=5), True


def for_ever(path, pipe):
    "Train, and tell what is acknowledged as soon as it is."
    tell = lambda *words: os.write(pipe.fileno(), (" ".join(map(str, words)) + "\n").encode())
    t, anew = opened(path)
    tell("resumed", t.iteration, int(anew))
    one, draw = t.loop.one, random.Random(t.iteration)

    def step():
        made = one()
        if draw.random() < 0.3: tell("event", t.event("promise", f"promised at {t.iteration}").result())
        return made

    t.loop.one = step
    t.saver.saved.append(lambda file: tell("checkpoint", int(file.stem.split("_")[1]), file.name))
    t.fit(until=10**9, progress=False)


def killed(path, seconds, trains):
    "Start a trainer and kill it after so many seconds, or so many after it `trains`; what it had promised."
    context = multiprocessing.get_context("forkserver")
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=for_ever, args=(str(path), write))
    process.start()
    write.close()
    said = os.read(read.fileno(), 1 << 16) if trains else b""  # waits for its first word
    time.sleep(seconds)
    process.kill()
    process.join()
    while more := os.read(read.fileno(), 1 << 16): said += more
    read.close()
    assert process.exitcode == -9, f"it ended by itself: {process.exitcode}"
    return [line.split() for line in said.decode().splitlines()]


def test_kills_at_random_moments(tmp_path):
    path, draw, promised, newest, figures = tmp_path / "run", random.Random(0), set(), 0, dict(kills=0, before_training=0, events=0, checkpoints=0, unloadable=0, lost=0, furthest=0)
    for _ in range(KILLS):
        said = killed(path, draw.uniform(0, 1.0), draw.random() < 0.7)
        figures["kills"] += 1
        resumed = next((w for w in said if w[0] == "resumed"), None)
        figures["before_training"] += resumed is None
        if resumed: assert int(resumed[1]) >= newest and (resumed[2] == "0" or not promised), "it goes on where the newest acknowledged checkpoint stands"
        promised |= {int(w[1]) for w in said if w[0] == "event"}
        saves = [int(w[1]) for w in said if w[0] == "checkpoint"]
        figures["checkpoints"] += len(saves)
        newest = max([newest, *saves])
        if not (path / "run.db").exists() or not newest: continue
        db = sqlite3.connect(path / "run.db")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()
        run = Run(path)
        figures["lost"] += len(promised - {e.id for e in run.events("promise")})
        assert max(c["step"] for c in run.checkpoints()) >= newest
        for c in run.checkpoints():
            try: read_state(path / "checkpoints" / c["file"], c["sha256"])
            except UserError: figures["unloadable"] += 1
        figures["furthest"] = max(figures["furthest"], run.step)
        run.close()
    figures["events"] = len(promised)
    print(figures)
    assert not figures["lost"] and not figures["unloadable"] and newest and promised, figures
    t, anew = opened(path)
    with t:
        assert not anew and t.iteration >= newest
        t.fit(3, progress=False)
        assert t.run.state == "done"
    assert len(events(path, "error")) == 0
