"""The sample behind a mark, while another process trains, after that was killed, and when whoever asks for it is killed."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from waiting import seen, until

from medlab import Run, Trainer
from medlab.core import UserError
from medlab.culprit.mark import accused_by, mark_at
from medlab.culprit.phantoms import HOLE, write_ward
from medlab.culprit.samples import samples_again
from medlab.recipes.origin import named_class
from medlab.run.sharing import is_live
from medlab.step.device import DeviceDecisions

TRAIN = "import sys; from medlab import Trainer; from medlab.recipes.origin import named_class; Trainer(named_class(sys.argv[1])(data_root=sys.argv[2], workers=int(sys.argv[4])), sys.argv[3], device='cpu', threads=1, case_budget=None, save_every=20).fit(until=10**6, progress=False)"
LOOK = "import sys; from medlab.culprit.process import find; find(sys.argv[1], int(sys.argv[2]), process=True)"


def start(code, *args):
    "A Python of its own."
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, *map(str, args)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def looks():
    "Processes that look for a sample, whoever their parent is."
    return [p for p in psutil.process_iter(["cmdline"]) if "medlab.culprit.process import work" in " ".join(p.info["cmdline"] or ())]


@pytest.fixture
def ward(tmp_path):
    "A project: a module of a name of its own, scans beside it."
    file = write_ward(tmp_path / "project")
    return file.rename(file.with_name(f"ward_{os.getpid()}_{abs(hash(tmp_path)) % 10**8}.py"))


def test_another_process_trains_and_is_killed(ward, tmp_path):
    path = tmp_path / "run"
    trainer = start(TRAIN, f"{ward}:Ward", ward.parent / "scans", path, 0)
    try:
        until(lambda: seen(path) or trainer.poll() is not None, 90)
        assert trainer.poll() is None, trainer.stderr.read().decode()
        run = Run(path)
        until(lambda: run.events("bad_sample") and run.events("drop") and run.step > 40, 90)
        hole, empty = (run.events(k)[0].step for k in ("bad_sample", "drop"))
        before = run.step
        for process in (False, True):
            found = run.sample_at(hole, process=process)
            assert (found.case, found.at, int(found.labels.sum())) == ("p02", HOLE, 24)
        assert run.sample_at(empty).module == "0 (Standardize)"
        until(lambda: run.step > before, 90)
        assert trainer.poll() is None and run.state == "running" and is_live(path), "its lock is its own"
    finally:
        trainer.kill()
        trainer.wait()
    assert run.state == "killed" and run.sample_at(hole).case == "p02" and run.state == "killed"
    late = max(e.step for e in run.events("drop") if 20 < e.step <= run.step - 1)  # events outlive the telemetry of the last half second
    found = run.sample_at(late, case="p04")  # where p02 was drawn too, that would be shown: left out, and seen by no network
    assert found.module == "0 (Standardize)" and "the checkpoint of step" in found.weights and not is_live(path)
    with Trainer.open(path, device="cpu", threads=1) as t: t.fit(steps=1, progress=False)  # and it goes on as if nobody had looked
    run.close()


def test_what_asks_is_killed(ward, tmp_path):
    text = ward.read_text()
    ward.write_text(text.replace("        v = read", "        import os, time\n        if os.path.exists(str(self.files[i]) + '.hang'): time.sleep(600)\n        v = read"))
    with Trainer(named_class(f"{ward}:Ward")(data_root=str(ward.parent / "scans")), tmp_path / "run", device="cpu", threads=1) as t:
        t.fit(steps=6, progress=False)
        hole = t.run.events("bad_sample")[0].step
    (ward.parent / "scans" / "p02.nii.gz.hang").touch()
    others = {p.pid for p in looks()}
    asking = start(LOOK, tmp_path / "run", hole)
    until(lambda: {p.pid for p in looks()} - others, 90)
    own = {p.pid for p in looks()} - others
    time.sleep(5)
    assert {p.pid for p in looks()} >= own, "it hangs"
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    until(lambda: not any(p.pid in own and p.status() != psutil.STATUS_ZOMBIE for p in looks()), 20)
    with pytest.raises(UserError, match="took more than timeout=8 s and was ended"): Run(tmp_path / "run").sample_at(hole, process=True, timeout=8)
    until(lambda: not any(p.pid not in others and p.status() != psutil.STATUS_ZOMBIE for p in looks()), 20)


def test_a_run_whose_samples_were_read_by_workers(ward, tmp_path):
    "The order and the bits are those of one process; and the look is made in another one."
    trainer = start(TRAIN, f"{ward}:Ward", ward.parent / "scans", tmp_path / "run", 1)
    try:
        until(lambda: seen(tmp_path / "run") or trainer.poll() is not None, 90)
        assert trainer.poll() is None, trainer.stderr.read().decode()
        run = Run(tmp_path / "run")
        until(lambda: run.events("bad_sample"), 120)
        state = torch.get_rng_state()
        found = run.sample_at(run.events("bad_sample")[-1].step)
        assert found.case == "p02" and found.bad[0].nan == 24 and Path(found.files[0]).name == "p02.nii.gz"
        assert torch.equal(state, torch.get_rng_state())
    finally:
        for p in [*psutil.Process(trainer.pid).children(recursive=True), trainer]: p.kill()
        trainer.wait()
    run.close()


class Watch:
    "Keeps every batch, with the history it is of."

    def __init__(self): self.seen, self.history = {}, 0
    def after_step(self, result, batch): self.seen[self.history, result.iteration] = batch


def same(a, b): return a.names == b.names and all(torch.equal(a[k].nan_to_num(7), b[k].nan_to_num(7)) and torch.equal(a[k].isnan(), b[k].isnan()) for k in a.tensors)


@pytest.mark.parametrize("device", [False, True])
def test_both_histories_of_a_run_that_went_back(ward, tmp_path, monkeypatch, device):
    "The first time and the second have other samples under the same number; each mark gives those of its time, to the bit, NaN in the network included."
    if device: monkeypatch.setattr("medlab.train.trainer.decisions_for", lambda *args: DeviceDecisions)
    watch = Watch()
    with Trainer(named_class(f"{ward}:Ward")(data_root=str(ward.parent / "scans")), tmp_path / "run", device="cpu", threads=1, check_inputs=False, case_budget=None, escalate_after=None, log_every=1) as t:
        t.listeners.append(watch)
        t.fit(steps=4, progress=False)
        t.set(gradient_accumulation_steps=2)
        t.fit(steps=8, progress=False)
        first = [e for e in t.run.events() if e.kind in ("drop", "skip", "nonfinite_loss") and e.step > 4]
        t.restore(4, samples_seen=t.batches.samples_seen + 3)
        watch.history = 1
        t.fit(steps=8, progress=False)
        run = Run(t.path)
        second = [e for e in run.events() if e.kind in ("drop", "skip", "nonfinite_loss") and e.step > 4 and e not in first]
        assert {e.step for e in first} & {e.step for e in second}
        for history, events in enumerate((first, second)):
            for e in events:
                again = samples_again(run, mark_at(run, e.step, e.id))
                then, now = watch.seen[history, e.step].micro_batches, again.make_batch().micro_batches
                assert again.mark.void is not bool(history) and len(then) == len(now) == 2 - history and all(map(same, then, now)), e
        holed = next(e for e in second if "p02" in accused_by(e))
        found = run.sample_at(holed.step, event=holed.id)
        assert found.used and found.case == "p02" and found.bad[0].nan == 24 and not found.module.startswith("2")
        assert int((found.labels == 1).sum()) == 24 and found.at == HOLE
