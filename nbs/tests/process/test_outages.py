"""Kills at the worst moments, and disks that are really full."""
import contextlib
import resource
import sqlite3
import subprocess
import time

import pytest
from toys import child, equal, events, losses, trainer, weights

from medlab.run.checkpoint import NotSaved, read_state
from medlab.run.directory import Run

STEPS = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Weights and losses of a run that nothing happens to."
    path = tmp_path_factory.mktemp("whole") / "run"
    with trainer(path, save_every=4) as t:
        t.fit(STEPS, progress=False)
        return weights(t), losses(path)


@pytest.mark.parametrize("where,at,expected", [("step", 11, (4, 8)), ("checkpoint", 12, (8,)), ("rename", 12, (8,)), ("listing", 12, (8,)), ("telemetry", 9, (4, 8, 12))])
def test_kill_at_the_worst_moment(tmp_path, whole, where, at, expected):
    "A checkpoint that is being written when its process dies is none; the next one waits for it."
    path = tmp_path / "run"
    status, said = child(path, f"faults.kill({where!r}, at={at})", STEPS, save_every=4)
    assert status == -9, said[-2000:]
    run = Run(path)
    assert run.state == "killed" and run._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for c in run.checkpoints(): read_state(path / "checkpoints" / c["file"], c["sha256"])
    with trainer(path, resume=True) as t:
        assert t.iteration in expected
        assert {f.name for f in (path / "checkpoints").iterdir()} == {c["file"] for c in run.checkpoints()}, "what was never listed is swept"
        t.fit(until=STEPS, progress=False)
        assert equal(weights(t), whole[0])
    assert losses(path) == whole[1]


@pytest.mark.parametrize("minutes,expected", [(1e-9, (9, 10)), (0, (0,))])
def test_a_kill_before_the_first_save_every(tmp_path, whole, minutes, expected):
    "Planted: killed in step 11 of the first 200. Saved by time, here after every step, it goes on from step 10, or 9 where that was being written; without, it begins anew."
    path = tmp_path / "run"
    status, said = child(path, "faults.kill('step', at=11)", STEPS, save_minutes=minutes)
    assert status == -9, said[-2000:]
    with trainer(path, resume=True) as t:
        assert t.iteration in expected and t.knobs.save_every == 200
        t.fit(until=STEPS, progress=False)
        assert equal(weights(t), whole[0])
    assert losses(path) == whole[1]


@pytest.fixture
def small_disk(tmp_path):
    "A file system of 3 MB."
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode: pytest.skip("no right to mount a small file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def train(t, steps):
    "Train; the error that ended it, if one did."
    try: t.fit(steps, progress=False)
    except (NotSaved, sqlite3.OperationalError) as e: return e


def test_a_disk_that_is_really_full(small_disk, whole):
    path = small_disk / "run"
    t = trainer(path, save_every=4)
    t.fit(8, progress=False)
    kept = [c["step"] for c in t.run.checkpoints()]
    with open(small_disk / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while True: f.write(bytes(4096))
    error = train(t, 3)
    with pytest.raises(NotSaved, match="No space left on device|disk is full"): t.save()
    end = time.monotonic() + 10
    while not t.writer.store.fault: assert time.monotonic() < end; time.sleep(0.05)
    assert [c["step"] for c in t.run.checkpoints()] == kept and t.saver.checkpoints.newest()[0]["progress"]["iteration"] == 8, error
    (small_disk / "filler").unlink()
    while t.writer.store.fault: assert time.monotonic() < end + 20; time.sleep(0.05)
    t.fit(STEPS - t.iteration, progress=False)
    assert equal(weights(t), whole[0]) and t.run.checkpoints()[-1]["step"] == STEPS
    t.close()
    assert losses(path) == whole[1], "not a row was lost"
    assert any("could not be written for" in s and "nothing was lost" in s for s in events(path, "store"))


def test_files_that_may_not_grow(tmp_path, whole):
    "The limit on the size of a file fails in the middle of a write, as a quota does."
    path = tmp_path / "run"
    with trainer(path, save_every=0) as t:
        t.fit(8, progress=False)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(NotSaved, match="File too large"): t.save()
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list((path / "checkpoints").glob("*.part")) and t.saver.checkpoints.newest()[0]["progress"]["iteration"] == 8
        t.fit(STEPS - 8, progress=False)
        assert equal(weights(t), whole[0])
    assert losses(path) == whole[1]
