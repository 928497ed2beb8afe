"""A training process to be killed, whose run is mirrored.

    mirror_victim.py RUN MIRROR PACE        trains for ever from wherever run or mirror stand, PACE seconds a step
    mirror_victim.py RUN MIRROR --until N   trains to step N and prints the hash of everything that decides how training goes on
"""
import sys
import time
from pathlib import Path

from victim import KNOBS, Small, digest, say

from medlab.core import UserError
from medlab.mirror.mirror import Mirror
from medlab.train.trainer import Trainer


def open_run(path, mirror):
    "A trainer on the run, on that in the mirror, or a new one."
    kw = dict(threads=1, mirror=Mirror(mirror, wait=60, pause=0.1, most=0.5))
    try: return Trainer(Small(), path, resume=True, **kw)
    except UserError as e:
        if "is empty" not in str(e): raise
    return Trainer(Small(), path, save_every=7, **kw, **KNOBS)


if __name__ == "__main__":
    path, mirror, *rest = sys.argv[1:]
    trainer = open_run(Path(path), mirror)
    one = trainer.loop.one

    def step():
        "A step, at its pace."
        made = one()
        say("step", trainer.iteration)
        time.sleep(float(rest[0]))
        return made

    if rest[0] == "--until":
        trainer.fit(until=int(rest[1]), progress=False)
        trainer.close()
        say(digest(trainer.state.state_dict()))
    else:
        say("begins", trainer.iteration)
        trainer.loop.one = step
        trainer.fit(until=10**9, progress=False)
