"""Waiting for other processes and threads."""
import time
from pathlib import Path

from medlab.run.directory import NoRunYet, Run


def until(
    true,  # function without arguments
    seconds,  # > 0
):
    "Wait until something is true; an `AssertionError` where it does not become so in time."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not become true in {seconds:g} s"
        time.sleep(0.01)


def seen(
    path,  # run directory
):
    "The run, once it can be read: its file is there before its tables are."
    try: return Run(path) if (Path(path) / "run.db").exists() else None
    except NoRunYet: return None
