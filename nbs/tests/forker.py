"""Forks a run again and again in processes that are killed: at random, or at a named stage of the making.

    forker.py RUN KILLS SEED       forks RUN beside itself: a kill at each stage, then KILLS at random times; says "done"
"""
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

from medlab.forks import fork

STAGES = dict(link=(fork, "read_head"), files=(fork, "copy_beginning"), curves=(fork, "copy_chunks"), changes=(fork, "copy_changes"), told=(fork, "tell_fork"))


def die(*_): os.kill(os.getpid(), signal.SIGKILL)


def dies_at(stage):
    "Let this process die at a stage; the last two are before and after the rename."
    if stage in STAGES: return setattr(*STAGES[stage], die)
    rename = os.rename
    os.rename = lambda *args: die() if stage == "rename" else (rename(*args), die())


def forks(run, name):
    "Fork until killed."
    for i in itertools.count(): fork.fork_run(run, 4, name=f"{name}-{i}")


def child(act):
    "A process that does it; its id."
    if pid := os.fork(): return pid
    try: act()
    finally: os._exit(1)


if __name__ == "__main__":
    run, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for stage in [*STAGES, "rename", "renamed"]:
        _, status = os.waitpid(child(lambda: (dies_at(stage), fork.fork_run(run, 4, name=stage))), 0)
        assert os.waitstatus_to_exitcode(status) == -9, (stage, status)
    for i in range(kills):
        pid = child(lambda: forks(run, f"kill{i}"))
        time.sleep(draw.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("done")
