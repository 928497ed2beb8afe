"""A training process to be killed, whose run is mirrored.

    mirror_victim.py RUN MIRROR    trains for ever from wherever run or mirror stand
"""
import sys
import time

from victim import KNOBS, Small, say

from medlab.core import UserError
from medlab.mirror.mirror import Mirror
from medlab.train.trainer import Trainer


def open_run(path, mirror):
    "A trainer on the run, on that in the mirror, or a new one."
    made = lambda: Mirror(mirror, wait=60, pause=0.1, most=0.5)
    try: return Trainer(Small(), path, resume=True, threads=1, mirror=made())
    except UserError as e:
        if "is empty" not in str(e): raise
    return Trainer(Small(), path, threads=1, mirror=made(), save_every=7, **KNOBS)


if __name__ == "__main__":
    trainer = open_run(*sys.argv[1:])
    one = trainer.loop.one

    def step():
        "A step, at a pace that leaves time to be killed in."
        time.sleep(0.004)
        return one()

    say("begins", trainer.iteration)
    trainer.loop.one = step
    trainer.fit(until=10**9, progress=False)
