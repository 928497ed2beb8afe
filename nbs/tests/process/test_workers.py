"""Workers that die, readers that raise anything: no sample is lost or comes twice, and every one that is left out is named."""
import os
import signal
import subprocess
import sys
import time

import pytest
from toys import Toy, events, losses, trainer

from fake_device import copies_ahead
from medlab import faults
from medlab.batches.loading import Guarded
from medlab.batches.processes import process_loader, within
from medlab.step.device import DeviceDecisions
from medlab.train import trainer as trainer_module

STEPS = 20  # two and a half epochs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The losses of a run without workers and without faults."
    path = tmp_path_factory.mktemp("whole") / "run"
    with trainer(path) as t: t.fit(STEPS, progress=False)
    return losses(path)


def test_a_worker_that_dies_while_it_reads(tmp_path, whole):
    with trainer(tmp_path / "run", Toy(workers=2)) as t, faults.plant(t, faults.kill_worker(index=7), faults.kill_worker(index=20, number=signal.SIGSEGV)) as planted:
        t.fit(STEPS, progress=False)
        cursor = t.batches.samples_seen
    assert len(planted.fired) == 2 and cursor == STEPS * 4 and losses(tmp_path / "run") == whole, "the same samples in the same order"
    said = events(tmp_path / "run", "bad_sample", "worker")
    assert len(said) == 2 and "SIGKILL" in " ".join(said) and "SIGSEGV" in " ".join(said) and all("started again" in s for s in said)


def test_workers_killed_from_outside_and_an_interrupt_in_the_terminal(tmp_path, whole):
    with trainer(tmp_path / "run", Toy(workers=2)) as t:
        t.fit(3, progress=False)
        for w in t.batches.workers: os.kill(w.pid, signal.SIGINT)  # what Ctrl-C sends to every process of a terminal
        t.fit(3, progress=False)
        assert not events(t.path, "bad_sample", "worker")
        for w in t.batches.workers: os.kill(w.pid, signal.SIGKILL)
        t.fit(STEPS - 6, progress=False)
    assert losses(tmp_path / "run") == whole and len(events(tmp_path / "run", "bad_sample", "worker")) == 1


def test_what_was_sent_ahead_survives_a_worker_that_dies(tmp_path, whole):
    "Its death may be noticed while a step is computed; it is dealt with when the next batch is asked for, as ever."
    with copies_ahead(), trainer(tmp_path / "run", Toy(workers=2), gradient_accumulation_steps=1) as t:
        t.fit(3, progress=False)
        for w in t.batches.workers: os.kill(w.pid, signal.SIGKILL)
        t.fit(5, progress=False)
        with faults.plant(t, faults.kill_worker(index=7)): t.fit(STEPS - 8, progress=False)
        cursor, sent = t.batches.samples_seen, len(t.batches.copy.made)
    assert losses(tmp_path / "run") == whole and cursor == STEPS * 4 and sent >= STEPS
    assert all("started again" in s for s in events(tmp_path / "run", "bad_sample", "worker")) and events(tmp_path / "run", "worker")


def test_a_skipped_step_is_read_again_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "decisions_for", lambda *a: DeviceDecisions)
    with trainer(tmp_path / "run", Toy(workers=1), log_every=8, escalate_after=None) as t:
        t.step.decisions.patience = 1e9
        with faults.plant(t, faults.gradient("0", at=3)): t.fit(8, progress=False)
        order = [f"toy{i:02}" for i in t.batches.sampler.order(0)[8:12]]
        look, = t.run.events("diagnosis")
        assert look.step == 3 and look.data["batch"] == order and look.data["late"] == 5 and t.batches.samples_seen == 32
        assert len(t.batches.workers) == 1


def test_a_sample_that_ends_whoever_reads_it(tmp_path):
    with trainer(tmp_path / "run", Toy(workers=1)) as t, faults.plant(t, faults.kill_worker(index=7, times=None)) as planted:
        t.fit(STEPS, progress=False)
        assert len(planted.fired) >= 3 and list(t.quarantine.samples.out) == [7] and t.batches.samples_seen == STEPS * 4
        dropped = sum(t.run.metrics("dropped")["dropped"].value)
    with trainer(tmp_path / "without") as t:
        t.quarantine.samples.force(7, "left out from the start")
        t.batches.seek(0)
        t.fit(STEPS, progress=False)
        assert sum(t.run.metrics("dropped")["dropped"].value) == dropped >= 2
    assert losses(tmp_path / "run") == losses(tmp_path / "without"), "all others as ever"
    assert any("sample 7" in s and "it ends whatever process reads it and is in quarantine" in s for s in events(tmp_path / "run", "bad_sample", "quarantine"))


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_sample_is_given_to_a_process_of_its_own_only_when_that_has_answered(ahead):
    "Else one that ends its process may take the answer with it, and the process is said to be at fault."
    given = []
    keys = (given.append(n) or [(n, None)] for n in range(2))
    loader = process_loader(Guarded([0, 1]), keys, 1, list, ahead=ahead)
    assert given == [*range(ahead)]
    assert within(loader, 60)[0][2] == 0 and given == [0, 1] and within(loader, 60)[0][2] == 1


RAISED = [StopIteration("the end?"), MemoryError(), KeyboardInterrupt(), SystemExit(3), OSError(5, "Input/output error"), EOFError("truncated"), GeneratorExit(), RuntimeError("corrupt")]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_that_raises(tmp_path, workers):
    raised = [e for e in RAISED if workers or not isinstance(e, KeyboardInterrupt)]  # in the trainer's own process that is the user's
    with trainer(tmp_path / "run", Toy(workers=workers)) as t, faults.plant(t, *(faults.reader(e, index=3 * i) for i, e in enumerate(raised))) as planted:
        t.fit(STEPS, progress=False)
        assert t.run.state == "done" and len(planted.fired) == len(raised) and not t.quarantine.samples.out
    said = events(tmp_path / "run", "bad_sample")
    assert len(said) == len(raised), said
    for i, e in enumerate(raised): assert sum(f"sample {3 * i} was left out: {type(e).__name__}" in s for s in said) == 1


def test_a_worker_that_hangs(tmp_path, whole):
    "It is ended and replaced; a sample that hangs again when it is read alone is left out, one that does not is used."
    with trainer(tmp_path / "run", Toy(workers=2), worker_timeout=1.5) as t, faults.plant(t, faults.hang_worker(index=7, times=1)) as planted:
        old = [w.pid for w in t.batches.workers]
        t.fit(STEPS, progress=False)
        assert len(planted.fired) == 1 and not t.quarantine.samples.out and t.batches.samples_seen == STEPS * 4 and not set(old) & {w.pid for w in t.batches.workers}
    said = events(tmp_path / "run", "worker")
    assert losses(tmp_path / "run") == whole and len(said) == 1 and "no batch came for 1.5 s (worker_timeout); they were ended" in said[0]
    with trainer(tmp_path / "stays", Toy(workers=2), worker_timeout=1.5) as t, faults.plant(t, faults.hang_worker(index=7, times=None)) as planted:
        t.fit(STEPS, progress=False)
        assert len(planted.fired) == 2 and list(t.quarantine.samples.out) == [7] and t.run.state == "done"
    assert any("sample 7" in s and "gave nothing for 1.5 s" in s and "is in quarantine" in s for s in events(tmp_path / "stays", "quarantine"))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in old), "what hung is gone"


def test_a_slow_reader_is_no_hung_one(tmp_path, whole):
    with trainer(tmp_path / "run", Toy(workers=1), worker_timeout=5.0) as t, faults.plant(t, faults.hang_worker(index=7, seconds=2.5)): t.fit(STEPS, progress=False)
    assert losses(tmp_path / "run") == whole and not events(tmp_path / "run", "worker", "quarantine")


def test_a_stop_is_heard_while_a_worker_hangs(tmp_path, whole):
    "It was never begun, what was waited for: the run goes on as if nothing had been."
    with trainer(tmp_path / "run", Toy(workers=2)) as t:
        with faults.plant(t, faults.hang_worker(index=7, seconds=3600)) as planted:
            t.start(STEPS)
            end = time.monotonic() + 60
            while not planted.fired: assert time.monotonic() < end; time.sleep(0.05)
            time.sleep(0.5)
            old = [w.pid for w in t.batches.workers]
            t.stop()
            t.wait(30)
            assert t.run.state == "stopped" and t.iteration < STEPS and t.run.checkpoints()[-1]["step"] == t.iteration
        t.fit(STEPS - t.iteration, progress=False)
    assert losses(tmp_path / "run") == whole and not any(os.path.exists(f"/proc/{pid}") for pid in old)


def test_a_batch_that_does_not_come_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("medlab.train.loop.PATIENCE", 1.0)
    with trainer(tmp_path / "run", Toy(workers=1)) as t, faults.plant(t, faults.hang_worker(index=7, seconds=5)): t.fit(STEPS, progress=False)
    said, = events(tmp_path / "run", "data_stall")
    assert "no batch has come for" in said and "worker_timeout" in said


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import psutil
from toys import Toy, trainer
class Cases(list): "What another process must find."
class Mine(Toy):
    def dataset(self): return Cases(super().dataset())
{guard}
    with trainer({run!r}, Mine(workers=2)) as t:
        t.start(10**6)
        while t.iteration < 3 and t.worker.thread.is_alive(): pass
        print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
        t.wait()
"""


def script(folder, guard="if __name__ == '__main__':", text=False):
    "A script of a user's in a process of its own; as text it is no file, like the cells of a notebook."
    (file := folder / "mine.py").write_text(code := SCRIPT.format(tests=os.path.dirname(__file__), run=str(folder / "run"), guard=guard))
    return subprocess.Popen([sys.executable, *(["-c", code] if text else [str(file)])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_no_worker_outlives_a_trainer_that_is_killed(tmp_path):
    process = script(tmp_path)
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) >= 3, process.communicate()
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while alive := [p for p in pids if os.path.exists(f"/proc/{p}") and open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] != "Z"]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


@pytest.mark.parametrize("how,words", [(dict(guard="if True:"), "this script would start training again in each of its loading processes"), pytest.param(dict(text=True), "Can't get attribute 'Cases'", marks=pytest.mark.long)], ids=["no_guard", "cells"])
def test_workers_that_cannot_start_are_no_fault_of_the_samples(tmp_path, how, words):
    process = script(tmp_path, **how)
    out, err = process.communicate(timeout=120)
    assert process.returncode and "UserError: a loading process cannot be started: it ended with status 1 before it read anything" in err and words in err, (out, err[-3000:])
    assert not events(tmp_path / "run", "bad_sample", "quarantine")
