"""kill -9: what was acknowledged is there afterwards, and training goes on to the same bits."""
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from medlab.run.checkpoint import read_state
from medlab.run.directory import Run, run_or_fault

VICTIM = [sys.executable, str(Path(__file__).with_name("victim.py"))]
KILLS = int(os.environ.get("MEDLAB_KILLS", 8))  # 200 for the long test
CHANGES = {11: dict(lr=1e-3), 26: dict(precision="bf16", lr=5e-4)}


def finish(path, until, changes=None):
    "Train to the end in a process of its own; the hash of the state."
    out = subprocess.run([*VICTIM, str(path), "--until", str(until), *([repr(changes)] if changes else [])], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    return out.stdout.split()[-1]


def kill_after(path, seconds, seed):
    "Start a trainer, kill it `seconds` after its first step; what it promised, and when it was killed."
    process = subprocess.Popen([*VICTIM, str(path), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stdout:
        said.append(line.split())
        if said[-1][0] == "step": break
    reader = threading.Thread(target=lambda: said.extend(line.split() for line in process.stdout))
    reader.start()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    at = time.monotonic()
    process.wait()
    reader.join()
    assert any(w[0] == "step" for w in said), process.stderr.read()[-2000:]
    return [w for w in said if len(w) > 1], at


def kill_at_step(path, step, changes=None):
    "Start a trainer that would train for long and kill it as soon as its telemetry shows a step."
    process = subprocess.Popen([*VICTIM, str(path), "--until", "100000000", *([repr(changes)] if changes else [])], stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not isinstance(r := run_or_fault(path), Run) or r.step < step: assert process.poll() is None and time.monotonic() < end; time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("changes", [pytest.param(None, marks=pytest.mark.long), CHANGES], ids=["plain", "changed"])
def test_resume_gives_the_same_bits(tmp_path, changes):
    whole = finish(tmp_path / "whole", 40, changes)
    assert finish(tmp_path / "halves", 20, changes) != whole
    kill_at_step(tmp_path / "halves", 30, changes)                   # dies somewhere beyond step 30; its newest checkpoint is of step 20
    state = newest(tmp_path / "halves")
    assert state["progress"]["iteration"] == 20 and Run(tmp_path / "halves").state == "killed"
    assert finish(tmp_path / "halves", 40, changes) == whole
    a, b = (Run(tmp_path / n).metrics("loss", "lr", "grad_norm") for n in ("whole", "halves"))
    assert all((a[k].step == b[k].step).all() and (a[k].value == b[k].value).all() for k in a)


def newest(path):
    "The newest checkpoint's state."
    c = Run(path).checkpoints()[-1]
    return read_state(path / "checkpoints" / c["file"], c["sha256"])


def test_kills_lose_nothing_that_was_acknowledged(tmp_path):
    path, draw, late = tmp_path / "run", random.Random(0), []
    resumed = acknowledged = 0
    for i in range(KILLS):
        said, killed = kill_after(path, draw.uniform(0, 0.9), i)
        db = sqlite3.connect(path / "run.db")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()
        run = Run(path)
        events = {e.id for e in run.events("promise")}
        assert {int(w[1]) for w in said if w[0] == "event"} <= events
        kept = {c["file"]: c["sha256"] for c in run.checkpoints()}
        promised = [w[1] for w in said if w[0] == "checkpoint"]
        assert not promised or promised[-1] in kept
        acknowledged += len(promised)
        for file, sha in kept.items(): read_state(path / "checkpoints" / file, sha)
        steps = [(int(w[1]), float(w[2])) for w in said if w[0] == "step"]
        assert steps[0][0] == resumed + 1, "went on from the newest checkpoint"
        missing = [t for n, t in steps if n > run.step]
        late.append(killed - min(missing) if missing else 0.0)
        resumed = max((newest(path)["progress"]["iteration"] for _ in kept), default=0) if kept else 0
        run.close()
    print(f"telemetry missing at the kill: at most {max(late):.3f} s, median {sorted(late)[len(late) // 2]:.3f} s")
    assert max(late) <= 0.5 and acknowledged > KILLS / 3
