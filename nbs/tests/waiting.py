"""Waiting for other processes and threads."""
import time


def until(
    true,  # function without arguments
    seconds,  # > 0
):
    "Wait until something is true; an `AssertionError` where it does not become so in time."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not become true in {seconds:g} s"
        time.sleep(0.01)
