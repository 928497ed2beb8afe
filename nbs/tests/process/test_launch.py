"""`torchrun … -m medlab train` and `medlab train --processes`: one run on several ranks, steered from outside, killed, and taken up again."""
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from toys import Half, trainer
from waiting import seen

from medlab.cli.main import main
from medlab.faults.outages import damage
from medlab.run.checkpoint import newest_state
from medlab.run.directory import Run
from medlab.run.sharing import is_live

pytestmark = pytest.mark.timeout(600)  # on a busy machine the ranks take a minute to start
TRAIN = ["restoration", "--debug", "--device", "cpu", "--gradient-accumulation-steps", "2", "--save-every", "5", "--threads", "1"]
WAY = ["--parallel", os.environ.get("MEDLAB_PARALLEL", "zero1")]
ENV = os.environ | dict(OMP_NUM_THREADS="1")
MEDLAB = [sys.executable, "-W", "ignore", "-m", "medlab", "train", *TRAIN]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "medlab", "train", *TRAIN]


def started(command, folder): return subprocess.Popen(command, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(true, process, seconds=240):
    "Wait for something in a run, as long as its process lives; what it then is."
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it never became true"
        assert process.poll() is None, "".join(process.communicate())[-3000:]
        time.sleep(0.1)
    return found


def rank_process(launcher, rank):
    "The process of a rank."
    return next(p for p in psutil.Process(launcher.pid).children(recursive=True) if p.environ().get("RANK") == str(rank) and "medlab" in p.cmdline())


def weights(path): return newest_state(path)[0]["model"]


def apart(a, b): return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def test_one_run_of_two_ranks_is_steered_from_outside(tmp_path):
    path = tmp_path / "runs/two"
    made = started([*TORCHRUN, "--steps", "100000", "--run-dir", "runs/two"], tmp_path)
    try:
        until(lambda: (r := seen(path)) and r.step > 3, made)
        run, other = Run(path), Run(path / "ranks/1")
        run.request(lr=3e-4)
        change = until(lambda: next((c for c in run.changes() if c.state == "applied"), None), made)
        until(lambda: any(c.state == "applied" for c in other.changes()), made)
        theirs = next(c for c in other.changes() if c.state == "applied")
        assert (change.applied_step, change.new, change.verified) == (theirs.applied_step, theirs.new, theirs.verified) and change.new == dict(lr=3e-4)
        run.request(lr=2.0, at=10**6)
        run.command("pause")
        until(lambda: run.state == "paused" and other.state == "paused", made)
        assert run.step == other.step
        run.command("resume")
        at = run.step
        until(lambda: run.step > at + 3, made)
        rank_process(made, 1).send_signal(signal.SIGTERM)  # as where its machine is about to be taken away
        told = made.communicate(timeout=240)
    finally: made.kill()
    assert made.returncode == 0 and run.state == other.state == "stopped" and run.step == other.step, told[1][-3000:]
    assert run.checkpoints()[-1]["step"] == run.step and not (path / "ranks/1/checkpoints").exists()
    assert sum("stopped at step" in line for line in told[0].splitlines()) == 1, "rank 0 speaks for all"


def test_a_rank_is_killed_and_all_go_on_from_the_checkpoint(tmp_path):
    "Once, rank 1; MEDLAB_KILLS says how often, and MEDLAB_PARALLEL how the ranks divide their work."
    kills, draw = int(os.environ.get("MEDLAB_KILLS", "1")), random.Random(0)
    steps, path = 8 * kills + 10, tmp_path / "two"
    whole = subprocess.run([*MEDLAB, "--steps", str(steps), "--run", "whole"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr[-2000:]
    made = started([*MEDLAB, "--steps", str(steps), "--run", "two", "--processes", "2", "--restarts", str(kills), *WAY], tmp_path)
    try:
        for i in range(kills):
            until(lambda: (r := seen(path)) and r.step > 8 * i + 4, made)
            rank_process(made, draw.randrange(2) if i else 1).kill()
        told = made.communicate(timeout=400)
    finally: made.kill()
    run = Run(path)
    assert made.returncode == 0 and run.state == "done" and run.step == steps, told[1][-3000:]
    assert run.environment["ranks"] == 2 and run.environment["parallel"] == WAY[1] and f"cpu × 2 ranks ({WAY[1]})" in told[0]
    assert len(run.events("resume")) == kills and all(e.text.startswith("going on after step") for e in run.events("resume"))
    print(kills, "kills: weights apart by", apart(weights(path), weights(tmp_path / "whole")))
    assert apart(weights(path), weights(tmp_path / "whole")) <= 1e-6
    part = subprocess.run([sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "two/ranks/1", "--processes", "2"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert part.returncode == 2 and "two/ranks/1 is the record of one rank of the run two" in part.stderr, part.stderr[-2000:]
    again = subprocess.run([sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "whole", "--steps", str(steps + 4), "--processes", "2"],
        cwd=tmp_path, env=ENV, capture_output=True, text=True)
    alone = subprocess.run([sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "two", "--steps", str(steps + 4), "--device", "cpu"],
        cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert again.returncode == alone.returncode == 0, again.stderr[-2000:] + alone.stderr[-2000:]
    assert Run(tmp_path / "whole").step == steps + 4 == run.step and apart(weights(path), weights(tmp_path / "whole")) <= 1e-6


def test_a_launcher_is_killed_and_the_ranks_stop_and_save(tmp_path):
    "Once; MEDLAB_KILLS says how often."
    kills, path = int(os.environ.get("MEDLAB_KILLS", "1")), tmp_path / "two"
    steps = 8 * kills + 16
    whole = subprocess.run([*MEDLAB, "--steps", str(steps), "--run", "whole"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr[-2000:]
    words = [*MEDLAB, "--run", "two", *WAY]
    for i in range(kills):
        made, seen_before = started([*words, "--steps", str(steps), "--processes", "2"], tmp_path), Run(path).step if i else 0
        until(lambda: (r := seen(path)) and r.step > seen_before + 2, made)
        acknowledged = Run(path).step
        made.kill()
        end = time.monotonic() + 60
        while is_live(path): assert time.monotonic() < end, "its ranks train on"; time.sleep(0.1)
        run = Run(path)
        assert run.state == "stopped" and run.checkpoints()[-1]["step"] == run.step >= acknowledged and "its launcher ended" in run.events("launcher")[-1].text
        assert "--resume two --processes 2" in run.events("launcher")[-1].text
        words = [sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "two"]  # divided as before
    last = subprocess.run([*words, "--steps", str(steps), "--processes", "2"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert all(found.get("parallel") == WAY[1] for _, found in Run(path).segments()), "as long as nobody says otherwise"
    assert last.returncode == 0 and Run(path).step == steps, last.stderr[-2000:]
    print(kills, "kills of the launcher: weights apart by", apart(weights(path), weights(tmp_path / "whole")))
    assert apart(weights(path), weights(tmp_path / "whole")) <= 1e-6


HALF = [sys.executable, "-W", "ignore", "-m", "medlab", "train", f"{Path(__file__).parent / 'toys.py'}:Half", "--seconds", "0.03", "--gradient-accumulation-steps", "2",
    "--save-every", "5", "--device", "cpu", "--threads", "1", "--steps", "60", "--run", "two", "--processes", "2", "--restarts", "1"]


def ended_as_whole(made, folder):
    "The run of two ranks, which has ended with the weights of one that nothing happened to."
    try: told = made.communicate(timeout=300)
    finally: made.kill()
    run = Run(folder / "two")
    assert made.returncode == 0 and run.state == "done" and run.step == 60 and len(run.events("resume")) == 1, told[1][-3000:]
    with trainer(folder / "whole", Half(), gradient_accumulation_steps=2, save_every=5) as t: t.fit(60, progress=False)
    assert apart(weights(folder / "two"), weights(folder / "whole")) <= 1e-6
    return run


@pytest.mark.parametrize("way", ["ddp", "zero1", "fsdp"])
def test_what_a_killed_rank_leaves_is_told_in_the_terminal(tmp_path, way):
    "Torch ends rank 0 before it can; with DDP it has saved what all have."
    made = started([*HALF[:-2], "--parallel", way], tmp_path)
    until(lambda: (r := seen(tmp_path / "two")) and r.step > 6, made)
    rank_process(made, 1).kill()
    told, run = made.communicate(timeout=120)[1], Run(tmp_path / "two")
    assert made.returncode == 1 and "medlab: a rank was ended by SIGKILL" in told and "since rank 1 ended or hangs" in told, told
    newest = run.checkpoints()[-1]["step"]
    assert f"the run is saved as of step {newest} of {run.step}\nmedlab: medlab train --resume two --processes 2 goes on with it" in told and "Traceback" not in told, told
    if way == "ddp": assert newest == run.step
    elif newest < run.step: assert any(f"2 ranks hold a share each of what a checkpoint needs, and they ended apart, so the state of step {run.step} is not saved" in e.text for e in run.events("checkpoint"))


OWN = """
import os; import torch
from toys import Half
class Mistaken(Half):
    def losses(self, model, batch):
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes > 7 and os.environ.get("RANK", "none") in os.environ["BAD"]: raise KeyError("label")
        return super().losses(model, batch)
class Unread(Half):
    def dataset(self):
        if os.environ["RANK"] in os.environ["BAD"]: raise FileNotFoundError("list.csv")
        return super().dataset()
class Flat(Half):
    def build_model(self): return torch.nn.Linear(4, 1)
class Moves(Half):
    def losses(self, model, batch):
        rank, self.passes = os.environ.get("RANK"), getattr(self, "passes", 0) + 1
        if rank == "0" and self.passes == 7: torch.nn.init.ones_(next(model.parameters()))
        if rank == "1" and self.passes == 7: raise KeyError("label")
        return super().losses(model, batch)
class Drifts(Half):
    def losses(self, model, batch):
        with torch.no_grad(): next(model.parameters()).add_(1e-3 * batch["x"].mean())
        return super().losses(model, batch)
class Clamps(Half):
    def losses(self, model, batch):
        with torch.no_grad(): next(model.parameters()).clamp_(-0.3, 0.3)
        return super().losses(model, batch)
class Plain(Half): pass
class Leaves(Half):
    def losses(self, model, batch):
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes == 7 and os.environ.get("RANK", "none") in os.environ["BAD"]: raise SystemExit(0)
        return super().losses(model, batch)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    "A function that trains one of those recipes, on two ranks where it is not told otherwise."
    (tmp_path / "of_ranks.py").write_text(OWN)
    monkeypatch.setitem(ENV, "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), ENV.get("PYTHONPATH", "")]))

    def train(name, way="ddp", bad="", ranks=HALF[-4:-2]):
        monkeypatch.setitem(ENV, "BAD", bad)
        words = [*HALF[:6], f"of_ranks.py:{name}", *HALF[7:-4], *ranks, *["--parallel", way] * bool(ranks)]
        return subprocess.run(words, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200)

    return train


@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_weights_that_another_ranks_mistake_finds_moved_are_not_saved(own, tmp_path, way):
    "Planted: rank 0 moved a weight in the very step that rank 1 ended."
    done, run = own("Moves", way), Run(tmp_path / "two")
    assert done.returncode == 1 and [c["step"] for c in run.checkpoints()] == [5] and "the run is saved as of step 5" in done.stderr, done.stderr


@pytest.mark.parametrize("name,told,way", [("Drifts", 1, "ddp"), ("Drifts", 0, "zero1"), ("Clamps", 0, "ddp"), ("Plain", 0, "zero1"), ("Plain", 0, "fsdp")])
def test_networks_that_part_are_told(own, tmp_path, name, told, way):
    """Planted: a weight that each rank moves by its own samples. One that all of them clamp alike must not trip it; and
    with zero1 every step begins with what the owner of a weight has."""
    done = own(name, way)
    parted = [e for e in Run(tmp_path / "two").events("parted")]
    assert done.returncode == 0 and len(parted) == told and done.stdout.count("of the network differ on rank 1") + done.stderr.count("of the network differ on rank 1") == told, done
    assert all(e.step == 5 and e.level == "error" and re.search(r"1 of \d+ tensors.*weight by \S+ of its size.*losses\(\) or the network writes", e.text) for e in parted), parted


@pytest.mark.parametrize("bad,ranks", [("none", []), ("01", HALF[-4:-2]), ("1", HALF[-4:-2])])
def test_sys_exit_in_the_recipe_is_no_success(own, tmp_path, bad, ranks):
    done, made = own("Leaves", bad=bad, ranks=ranks), 6 if ranks else 3  # of two micro-batches each rank makes one
    assert done.returncode == 1 and f"the run is saved as of step {made}" in done.stderr, done.stderr
    why = "rank 1 stopped training: SystemExit: 0" if bad == "1" else "the recipe's own code ended Python, by sys.exit(0)\nof_ranks.py, line 33, in losses: "
    assert why in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert Run(tmp_path / "two").state == "failed"


@pytest.mark.parametrize("name,why,bad,way", [("Mistaken", "KeyError: 'label'", "01", "ddp"), ("Mistaken", "KeyError: 'label'", "1", "zero1"), ("Mistaken", "KeyError: 'label'", "01", "fsdp"),
    ("Mistaken", "KeyError: 'label'", "0", "fsdp"), ("Unread", "FileNotFoundError: list.csv", "01", "ddp"), ("Unread", "FileNotFoundError: list.csv", "1", "ddp")])
def test_a_mistake_in_the_recipe_is_shown_once_with_its_line_and_its_rank(own, tmp_path, monkeypatch, name, why, bad, way):
    "And no step that was made before is lost."
    told = own(name, way, bad).stderr
    assert told.count("Traceback") <= 1 == told.count(f"of_ranks.py, line {7 if name == 'Mistaken' else 11}, in ") and told.count(why) == (2 if bad == "1" else 1), told
    assert ("on rank 1" in told) == (bad == "1") and "replicas.py" not in told and len(told.splitlines()) < 16, told
    if name != "Mistaken": return
    run, made = Run(tmp_path / "two"), 7 - (way == "fsdp")  # it learns the order of its blocks in a pass before the first
    assert run.step == made and f"the run is saved as of step {made}" in told and [c["step"] for c in run.checkpoints()] == [5, made], told
    monkeypatch.setitem(ENV, "BAD", "-")
    for words in (["--resume", "two", "--processes", "2"], ["of_ranks.py:Mistaken", *HALF[9:11], *HALF[13:17], "--run", "one"]):
        done = subprocess.run([*HALF[:6], *words, "--steps", "20"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert apart(weights(tmp_path / "one"), weights(tmp_path / "two")) <= 1e-6


def test_a_network_without_blocks_stays_whole_with_fsdp(tmp_path, monkeypatch):
    (tmp_path / "of_ranks.py").write_text(OWN)
    monkeypatch.setitem(ENV, "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), ENV.get("PYTHONPATH", "")]))
    for name, words in (("one", ()), ("two", ("--processes", "2", "--parallel", "fsdp"))):
        command = [*HALF[:6], "of_ranks.py:Flat", "--gradient-accumulation-steps", "2", "--device", "cpu", "--threads", "1", "--steps", "20", "--run", name, *words]
        done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert apart(weights(tmp_path / "one"), weights(tmp_path / "two")) <= 1e-6


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_rank_that_hangs_is_named_and_all_go_on(tmp_path, way):
    "30 s of it are those in which torchrun asks the one that hangs to end."
    made = started([*HALF, "--rank-wait", "10", "--parallel", way], tmp_path)
    until(lambda: (r := seen(tmp_path / "two")) and r.step > 6, made)
    rank_process(made, 1).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    run = Run(tmp_path / "two")
    until(lambda: run.events("error"), made)
    print("it is told after", time.monotonic() - began, "s:", run.events("error")[-1].text)
    assert time.monotonic() - began < 60 and "since rank 1 ended or hangs" in run.events("error")[-1].text
    assert run.events("error")[-1].data.get("rank") is None and "--rank-wait of medlab train" in run.events("error")[-1].text
    ended_as_whole(made, tmp_path)


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(tmp_path):
    path, made = tmp_path / "two", started(HALF, tmp_path)
    until(lambda: (r := seen(path)) and r.step > 12, made)
    run = Run(path)
    run.command("pause")
    until(lambda: run.state == "paused", made)
    older, newest = run.checkpoints()[-2:]
    damage(path / "checkpoints" / newest["file"])
    rank_process(made, 0).kill()  # the other one cannot save what both have learned
    ended_as_whole(made, tmp_path)
    assert run.events("resume")[0].text.startswith(f"going on after step {older['step']}")
    for own in (run, Run(path / "ranks/1")): assert sum(f"{newest['file']} is damaged" in e.text for e in own.events("checkpoint")) == 1


def test_another_run_is_never_gone_on_with(tmp_path):
    "The ranks that refuse it are started anew, and refuse it again."
    with trainer(tmp_path / "two", Half(), gradient_accumulation_steps=2) as t: t.fit(2, progress=False)
    told = subprocess.run(HALF, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.count("holds a run already, of 2 steps") == 2, told.stderr[-3000:]
    assert Run(tmp_path / "two").step == 2 and not Run(tmp_path / "two").events("resume")


def test_ctrl_c_stops_all_ranks_and_saves(tmp_path):
    made = subprocess.Popen([*MEDLAB, "--steps", "100000", "--run", "two", "--processes", "2"], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        run = until(lambda: (r := seen(tmp_path / "two")) and r.step > 3 and r, made)
        held = subprocess.run([sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "two", "--processes", "2"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
        assert held.returncode == 2 and held.stderr.count("is held by a live trainer") == 1
        os.killpg(made.pid, signal.SIGINT)
        told = made.communicate(timeout=240)
    finally: made.kill()
    assert made.returncode == 130 and run.state == "stopped" and run.checkpoints()[-1]["step"] == run.step and "Traceback" not in told[1], told[1][-2000:]


def test_what_the_ranks_cannot_do_is_said_once(tmp_path):
    few = subprocess.run([*MEDLAB[:-4], "--threads", "1", "--gradient-accumulation-steps", "1", "--steps", "4", "--processes", "2", "--run", "few"],
        cwd=tmp_path, env=ENV, capture_output=True, text=True)
    lines = [line for line in few.stderr.splitlines() if line.startswith("medlab:")]
    assert few.returncode == 2 and len(lines) == 1 and "gradient_accumulation_steps=1 must be at least 2" in lines[0], few.stderr[-3000:]


def test_a_rank_without_a_name_for_its_run_is_refused(tmp_path):
    rank = subprocess.run([*MEDLAB, "--steps", "4"], cwd=tmp_path, env=ENV | dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1"), capture_output=True, text=True)
    assert rank.returncode == 2 and "under a launcher the run needs a name" in rank.stderr and not any(tmp_path.iterdir())


@pytest.mark.parametrize("words,why", [
    ("--processes 0", "--processes 0 must be at least 1"),
    ("--parallel zero1", "--parallel zero1 is for several processes"),
    ("--processes 2 --parallel zero", "unknown parallel 'zero'; did you mean 'zero1'"),
    ("--processes 2 --restarts -1", "--restarts -1 must be at least 0"),
    ("--restarts 2", "--restarts 2 is for several processes")])
def test_numbers_of_processes_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TRAIN, *words.split(), "--steps", "1", "--run", "bad"]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "bad").exists()
