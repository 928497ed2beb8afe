"""A proof: arms that are forks to the bit, verdicts that follow from them, whatever is killed meanwhile, and a run that is left alone."""
import copy
import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import Future

import pytest
from victim import KNOBS, Small, digest
from waiting import until

from medlab import recipes
from medlab.cli.main import main
from medlab.core import UnknownName, UserError
from medlab.forks.fork import PROOFS, fork_run
from medlab.prove import start as start_module
from medlab.prove.proof import proofs_of
from medlab.prove.start import begin, new_proof, prove
from medlab.prove.work import make_proof
from medlab.run.directory import Run
from medlab.run.store import Store
from medlab.train.again import begin_again, make_steps
from medlab.step.device import DeviceDecisions
from medlab.train import trainer as trainer_module
from medlab.train.trainer import Trainer

KILLS = int(os.environ.get("MEDLAB_KILLS", 8))  # 50 for the long test
RECIPES = dict(fast_ddpm=recipes.FastDDPM, restoration=recipes.Restoration, segmentation=recipes.Segmentation)
QUICK = dict(steps=4, scores=False, draws=1, process=False, say=lambda text: None)


def tiny(name="restoration", **fields):
    "A recipe that makes a step in some hundredths of a second."
    small = dict(fast_ddpm=dict(image_size=(8, 8, 8)), restoration=dict(image_size=(16, 16), blocks=(1,))).get(name, {})
    return RECIPES[name](**RECIPES[name].tiny | small | fields)


def trained(path, recipe=None, steps=4, **knobs):
    "A run of some steps."
    with Trainer(recipe or tiny(), path, threads=1, val_share=0.0, **knobs) as t:
        t.step.scaler._init_scale = 16.0  # with torch's 65,536 the first steps would all be skipped
        t.fit(steps, progress=False)
        assert t.step.optimizer_step
    return path


def digests(proof): return {r.key: r.digest for r in proof.results}


# arms are forks

@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_arm_is_a_fork_to_the_bit(tmp_path, name, precision):
    "With the recipe's own seed and a change, after other arms, it is what a fork makes that another trainer goes on with."
    knobs = dict(precision=precision, ema=0.9, gradient_accumulation_steps=2, schedule="cosine", horizon=9)
    trained(tmp_path / "first", tiny(name), 2, **knobs)
    arms, fork = fork_run(tmp_path / "first", name="arms"), fork_run(tmp_path / "first", knobs=dict(lr=1e-4), name="fork")
    with Trainer(tiny(name), fork.path, resume=True, threads=1, val_share=0.0) as t:
        t.fit(2, progress=False)
        wanted = t.state.state_dict()
    with Trainer(tiny(name), arms.path, resume=True, threads=1) as t:
        state = copy.deepcopy(t.state.state_dict())
        for seed, change in ((5, {}), (6, dict(weight_decay=0.3)), (None, dict(lr=1e-4))):
            begin_again(t, state, seed)
            if change: t.set(**change)
            make_steps(t, 2)
        found = t.state.state_dict()
    for s in (wanted, found): s["knobs"].pop("val_share")
    assert digest(found) == digest(wanted)


def test_an_arm_where_the_device_decides(tmp_path, monkeypatch):
    "As on a GPU, where what came of a step is known some steps later."
    monkeypatch.setattr(trainer_module, "decisions_for", lambda *args: DeviceDecisions)
    trained(tmp_path / "first", precision="fp16", log_every=4)
    made = [digests(prove(tmp_path / "first", knobs=dict(clip_norm=1e9), **QUICK | dict(steps=6))) for _ in range(2)]
    assert made[0] == made[1] and len({made[0]["off", i] for i in (1, 2, 3)}) == 3
    with Trainer(tiny(), fork_run(tmp_path / "first", name="fork").path, resume=True, threads=1, val_share=0.0) as t:
        t.fit(6, progress=False)
        wanted = t.state.state_dict()["model"]
    with Trainer(tiny(), fork_run(tmp_path / "first", name="arms").path, resume=True, threads=1) as t:
        state = copy.deepcopy(t.state.state_dict())
        for seed in (5, None):
            begin_again(t, state, seed)
            make_steps(t, 6)
        assert digest(t.state.state_dict()["model"]) == digest(wanted)


def test_several_at_once(tmp_path):
    "Each by itself against the common arm, and all together; the error is divided."
    trained(tmp_path / "first", lr=1e-3)
    proof = prove(tmp_path / "first", "lower_lr", "clip_norm", knobs=dict(weight_decay=0.5), combined=True, pairs=8, aa=0, **QUICK)
    names = ["lower_lr", "clip_norm", "weight_decay=0.5", "combined"]
    assert list(proof.verdicts) == names
    assert all(v.pairs == (3 if v.kind == "identical" else 8) for v in proof.verdicts.values()), "four share the error, so pair 8 is the first that can decide"
    assert proof.plan.factors[-1].knobs == dict(lr=2e-4, clip_norm=1.0, weight_decay=0.5)
    assert len({proof.results[i].digest for i in range(5)}) >= 4 and "combined" in str(proof)
    assert proof.verdicts["lower_lr"].level > 0.98


def test_arms_with_loading_processes(tmp_path):
    trained(tmp_path / "first", tiny(workers=1))
    made = [digests(prove(tmp_path / "first", knobs=dict(clip_norm=1e9), **QUICK)) for _ in range(2)]
    assert made[0] == made[1] and len(made[0]) == 6


# what does nothing is identical

@pytest.mark.parametrize("name", ["segmentation", *(pytest.param(n, marks=pytest.mark.long) for n in ("fast_ddpm", "restoration"))])
def test_what_does_nothing_is_identical(tmp_path, name):
    "A clip that never binds, activations that are computed again, a validation that never comes: each is equal to the bit."
    trained(tmp_path / "first", tiny(name), clip_norm=1e8, activation_checkpointing=False)
    factors = dict(clip=dict(clip_norm=1e9), checkpointing=dict(activation_checkpointing=True), checks=dict(check_inputs=False), keep=dict(keep=7))
    for knobs in factors.values():
        v, = prove(tmp_path / "first", knobs=knobs, **QUICK).verdicts.values()
        assert v.kind == "identical" and v.final and v.pairs == 3, (name, knobs, v)


# the run that it is about

def test_the_run_is_left_alone(tmp_path):
    "A run that trains while it is proved ends in the bits of one that was left alone; its events name the proof, its log only what was kept."
    with Trainer(Small(), tmp_path / "alone", threads=1, **KNOBS) as t:
        t.fit(until=30, progress=False)
        alone = digest(t.state.state_dict())
    t = Trainer(Small(), tmp_path / "first", threads=1, **KNOBS)
    t.fit(until=6, progress=False)
    proof = prove(t.path, knobs=dict(clip_norm=1e9), cls=Small, cases="train", **QUICK)
    t.fit(until=30, progress=False)
    assert digest(t.state.state_dict()) == alone and not t.run.changes() and t.run.step == 30
    assert [e.text.split(",")[0] for e in t.run.events("proof")][-1] == "proof 001-clip_norm=1000000000.0"
    proof.keep()
    t.fit(2, progress=False)
    change = t.run.changes()[-1]
    assert (change.state, change.source) == ("applied", "proof 001-clip_norm=1000000000.0: identical to the bit within 4 steps")
    told = t.run.events("proof")[-1]
    assert told.level == "warning" and "is kept, though proof 001-clip_norm=1000000000.0 did not show that it helps: identical" in told.text
    t.close()
    assert [r.name for r in Run.list(tmp_path)] == ["alone", "first"], "a proof is no run of its own"


def test_it_waits_where_that_is_asked_for(tmp_path):
    t = Trainer(tiny(), tmp_path / "first", threads=1, val_share=0.0)
    t.start(until=10**6)
    seen = []
    look = lambda text: seen.append((t.run.state, t.iteration))
    prove(t.path, knobs=dict(clip_norm=1e9), pause=True, **QUICK | dict(say=look))
    assert {s for s, _ in seen[2:]} == {"paused"} and len({i for _, i in seen[2:]}) == 1
    end = time.monotonic() + 20
    while t.run.state != "running": assert time.monotonic() < end; time.sleep(0.01)
    t.stop()
    t.wait(20)
    t.close()


def proving(*argv):
    "`medlab prove` in a process of its own."
    lend = os.environ | dict(OMP_NUM_THREADS="1")
    return subprocess.Popen([sys.executable, "-m", "medlab", "prove", *map(str, argv)], env=lend, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("person", ["", "before", "meanwhile"])
def test_a_killed_proof_lets_training_go_on(tmp_path, person):
    "Training that waits for a proof goes on once that is killed, and says so; a person's own pause lasts, also when the proof goes on."
    t = Trainer(tiny(), tmp_path / "first", threads=1, val_share=0.0)
    t.start(until=10**6)
    until(lambda: t.iteration > 3, 120)
    proof = new_proof(t.path, knobs=dict(lr=1e-5), steps=4, scores=False, draws=1, pairs=7, aa=6)
    if person == "before": t.pause()
    process = proving(proof.path, "--pause")
    until(lambda: proof.results and t.run.state == "paused", 120)
    if person == "meanwhile": t.run.command("pause", "panel")
    assert not t.run.events("proof")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if person:
        time.sleep(3)
        assert t.run.state == "paused" and not t.run.events("proof")
        make_proof(proof.path, steer=True)
        time.sleep(0.5)
        assert t.run.state == "paused" and "paused, and not by proofs/001-lr=1e-05" in t.run.events("command")[-1].text
        t.resume()
    until(lambda: t.run.state == "running", 5)
    if not person:
        told = t.run.events("proof")[0]
        assert told.level == "warning" and "waited for proofs/001-lr=1e-05, whose process ended without a word" in told.text
        make_proof(proof.path, steer=True)
        until(lambda: t.run.state == "running", 5)
        assert [e.text.split()[0] for e in t.run.events("command")] == ["save", "pause", "pause", "resume"]
    t.stop()
    t.wait(20)
    t.close()


def rush(path, barrier, told, rounds):
    "Begin a proof as often as the other one, at the same moment."
    for i in range(rounds):
        knobs = dict(clip_norm=1e9 - 2 * i - (barrier.wait() == 0))
        try: told.put((i, prove(path, knobs=knobs, at="newest", **QUICK | dict(steps=1)).name))
        except UserError as e: told.put((i, f"refused: {e}"))
        barrier.wait()


def test_two_at_once(tmp_path):
    "Of two that are begun at the same moment one is made, and the other is told so; whichever of them it is, and ten times over."
    trained(tmp_path / "first")
    spawn, rounds = multiprocessing.get_context("spawn"), 10
    barrier, told = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=rush, args=(tmp_path / "first", barrier, told, rounds)) for _ in range(2)]
    for p in both: p.start()
    found = sorted(told.get(timeout=120) for _ in range(2 * rounds))
    for p in both: p.join(60)
    for i in range(rounds):
        made, refused = (text for j, text in found if j == i)
        assert made[:4] == f"{i + 1:03d}-" and refused.startswith("refused: a proof of first is being "), (made, refused)
        assert "wait for it, or stop it" in refused
    proofs = proofs_of(tmp_path / "first")
    assert len(proofs) == rounds and {p.state for p in proofs} == {"done"}


def test_one_does_not_go_on_beside_another(tmp_path, capsys):
    "It is told which one is being made; once that is done it goes on."
    run = trained(tmp_path / "first")
    first, second = (new_proof(run, knobs=dict(lr=lr), pairs=7, aa=6, steps=40, scores=False, draws=1) for lr in (1e-5, 2e-5))
    process = proving(second.path)
    until(lambda: second.results, 120)
    assert main(["prove", str(first.path)]) == 2 and f"a proof of first is being made, {second.name}; wait for it" in capsys.readouterr().err
    assert not first.results
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert main(["prove", str(first.path)]) == 0 and first.state == "done"


@pytest.mark.parametrize("command", ["fork PROOF --run OUT", "evaluate PROOF", "export PROOF OUT", "notebook PROOF OUT.ipynb", "train --resume PROOF",
    "predict PROOF RUN OUT", "compare PROOF RUN"])
def test_a_proof_is_no_run(tmp_path, capsys, command):
    "What takes a run refuses a proof, whose scores would be those of the state that its arms begin with; the run itself is taken."
    run = trained(tmp_path / "first")
    proof = new_proof(run, knobs=dict(lr=1e-5), steps=4, scores=False, draws=1)
    words = [{"PROOF": str(proof.path), "RUN": str(run)}.get(w, w.replace("OUT", str(tmp_path / "out"))) for w in command.split()]
    assert main(words) == 2 and "is a proof, made of many arms from one state of first, and no run of its own" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    if words[0] in ("fork", "export", "notebook"): assert main([str(run) if w == str(proof.path) else w for w in words]) == 0


# killed

def kill_at_work(proof, times, rng):
    "Kill `medlab prove` as it goes on, while it begins or after its next arm, until the proof is done; how often, at most `times`."
    kills = 0
    while kills < times and proof.left is not None:
        process, before = proving(proof.path), len(proof.results)
        if rng.random() < 0.25: time.sleep(3 * rng.random())
        else: until(lambda: process.poll() is not None or len(proof.results) > before, 120)
        time.sleep(0.3 * rng.random())
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        assert len(proof.results) >= before
    return kills


@pytest.mark.timeout(300 + 60 * KILLS)
def test_killed_it_goes_on(tmp_path):
    "Killed again and again, at whatever moment, it makes the arms of one that never was, and loses none that it had told of."
    trained(tmp_path / "first")
    asked, rng, kills, kept = dict(at="newest", pairs=7, aa=6, steps=8, scores=False, draws=1), random.Random(0), 0, 0
    for n in itertools.count(1):  # a proof has too few arms for many kills
        lr = n * 1e-6
        cut = new_proof(tmp_path / "first", knobs=dict(lr=lr), **asked)
        kills += kill_at_work(cut, KILLS - kills, rng)
        kept += len(cut.results)
        make_proof(cut.path)
        whole = prove(tmp_path / "first", knobs=dict(lr=lr), say=lambda text: None, process=False, **asked)
        theirs, ours = digests(whole), digests(cut)
        shared = theirs.keys() & ours.keys()
        assert cut.state == "done" and all(theirs[k] == ours[k] for k in shared) and ("off", 3) in shared
        assert cut.verdicts[f"lr={lr}"].kind == whole.verdicts[f"lr={lr}"].kind
        if kills == KILLS: break
    print(f"{kills} kills of {n} proofs, {kept} arms made meanwhile")
    assert kept >= KILLS / 2, "arms were made between the kills"


def test_killed_while_it_is_made(tmp_path, monkeypatch):
    "A proof that died before it had a plan is none; the next one is made beside it."
    trained(tmp_path / "first")
    monkeypatch.setattr(start_module, "_write_plan", lambda place, plan: os._exit(9))
    pid = os.fork()
    if not pid:
        new_proof(tmp_path / "first", knobs=dict(lr=1e-5))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    monkeypatch.undo()
    assert not proofs_of(tmp_path / "first")
    assert new_proof(tmp_path / "first", knobs=dict(lr=1e-5)).name == "002-lr=1e-05"


# refused

def test_a_full_disk(tmp_path, monkeypatch):
    "Where the database of a proof cannot be written, it says so, and no arm that was not written counts."
    trained(tmp_path / "first")
    proof = new_proof(tmp_path / "first", knobs=dict(lr=1e-5), steps=4, scores=False, draws=1)
    real, n = Store.write, [0]

    def full(self, sql, *params):
        "Refuse the third arm."
        n[0] += "INTO events" in sql and "arm" in params
        if n[0] != 3 or "arm" not in params: return real(self, sql, *params)
        refused = Future()
        refused.set_exception(OSError(28, "No space left on device"))
        return refused
    monkeypatch.setattr(Store, "write", full)
    with pytest.raises((UserError, OSError), match="No space left"): make_proof(proof.path)
    monkeypatch.undo()
    assert proof.state == "failed" and [e.level for e in proof.run.events("error")] == ["error"]


@pytest.mark.parametrize("damage", ["torn", "later", "gone"])
def test_what_cannot_be_proved(tmp_path, damage):
    trained(tmp_path / "first")
    if damage == "torn": (tmp_path / "first/run.db").write_bytes(b"torn")
    if damage == "gone": (tmp_path / "first/run.db").unlink()
    if damage == "later":
        db = sqlite3.connect(tmp_path / "first/run.db")
        db.execute("PRAGMA user_version=99")
        db.close()
    with pytest.raises(UserError) as e: prove(tmp_path / "first", knobs=dict(lr=1e-5), **QUICK)
    assert not (tmp_path / "first" / PROOFS).exists() or not proofs_of(tmp_path / "first"), e.value


def test_trained_on(tmp_path):
    "A proof whose run somebody trained on stands elsewhere, and is refused."
    trained(tmp_path / "first")
    proof = new_proof(tmp_path / "first", knobs=dict(lr=1e-5), steps=4, scores=False, draws=1)
    with Trainer(tiny(), proof.path, resume=True, threads=1) as t: t.fit(1, progress=False)
    with pytest.raises(UserError, match="was trained on, to step 5"): make_proof(proof.path)


def test_no_evaluation(tmp_path):
    "A recipe that holds no case out is refused, with what to do; samples that are trained on may judge."
    with Trainer(Small(), tmp_path / "first", threads=1, **KNOBS) as t: t.fit(4, progress=False)
    with pytest.raises(UserError, match="holds no case out.*cases='train'"):
        prove(tmp_path / "first", knobs=dict(lr=1e-5), cls=Small, **QUICK)
    v, = prove(tmp_path / "first", knobs=dict(clip_norm=1e9), cls=Small, cases="train", **QUICK).verdicts.values()
    assert v.kind == "identical"


def test_a_mistake_of_the_users_own(tmp_path):
    "An error in the recipe's own code ends the proof at once, with the user's line."
    class Wrong(recipes.Restoration):
        def losses(self, model, batch):
            if self.knobs.lr < 1e-4: return dict(loss=batch["imgae"])
            return super().losses(model, batch)
    trained(tmp_path / "first", Wrong(**recipes.Restoration.tiny | dict(image_size=(16, 16), blocks=(1,))))
    with pytest.raises(KeyError, match="imgae"): prove(tmp_path / "first", knobs=dict(lr=1e-5), cls=Wrong, **QUICK)
    proof, = proofs_of(tmp_path / "first")
    assert proof.state == "failed" and "test_prove.py" in proof.run.events("error")[-1].text
    told = Run(tmp_path / "first").events("proof")[-1]
    assert told.level == "error" and told.text.startswith("proof 001-lr=1e-05 failed: KeyError: 'imgae'") and "test_prove.py" in told.text


def test_a_plan_that_cannot_decide(tmp_path, capsys):
    "It is refused before anything is made, with the rule and the remedy; one that can tell huge effects alone says so beforehand."
    trained(tmp_path / "first")
    with pytest.raises(UserError, match="seeds=3 with aa=0 and alpha=0.05 can never reach a verdict.*take seeds=6 or more, or aa=8"):
        prove(tmp_path / "first", knobs=dict(lr=1e-5), pairs=3, aa=0, **QUICK)
    assert not proofs_of(tmp_path / "first")
    said = []
    prove(tmp_path / "first", knobs=dict(lr=1e-5), pairs=3, aa=6, **QUICK | dict(say=said.append))
    assert "3 pairs can tell no more than that an effect is huge" in said[0] and "need seeds=6 or more" in said[0]
    told = proofs_of(tmp_path / "first")[0]
    assert any("3 pairs can tell no more" in e.text for e in Run(tmp_path / "first").events("proof")) and told.state == "done"


def test_before_its_first_arm_and_after_an_early_verdict(tmp_path):
    "By what it judges is not known before; why it stopped long before its last pair is said after."
    trained(tmp_path / "first")
    proof = new_proof(tmp_path / "first", knobs=dict(clip_norm=1e9), pairs=24, steps=2, scores=False, draws=1)
    assert "judged by loss on at most 4 held-out cases, unless a factor changes the loss itself; 0 arms" in str(proof) and "None" not in str(proof)
    assert "None" not in str(proof.table()[0].keys()) and not proof.early
    make_proof(proof.path)
    n = proof.results[0].cases
    assert f"judged by loss on {n} held-out case" in str(proof) and "less is better; 6 arms" in str(proof) and "nothing of other patients" in str(proof)
    assert proof.table()[0]["steps of an arm"] == "2" and proof.table()[0]["judged on"].startswith(f"{n} held-out case")
    closing = Run(tmp_path / "first").events("proof")[-1]
    assert "clip_norm=1000000000.0: identical to the bit within 2 steps (3 pairs)" in closing.text
    assert closing.data["verdicts"]["clip_norm=1000000000.0"]["exceeded"] == ""
    assert str(proof).endswith("decided at pair 3 of at most 24, and the first verdict is final: 3 pairs that are equal to the bit are enough")


def test_ctrl_c_says_what_is_kept(tmp_path):
    "And the command that goes on, which then makes what is left."
    trained(tmp_path / "first")
    new_proof(tmp_path / "first", knobs=dict(lr=1e-5), pairs=7, aa=6, steps=40, scores=False, draws=1)
    proof, = proofs_of(tmp_path / "first")
    process = proving(proof.path, "--steps", 40)
    until(lambda: len(proof.results) > 1, 120)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0].splitlines()
    n = len(proof.results)
    assert process.returncode == 130 and proof.state == "stopped"
    assert said[-1] == f"medlab: interrupted: {n} arms of proof {proof.name} are kept; it goes on with: medlab prove {proof.path}"
    before = digests(proof)
    process = proving(*said[-1].split("medlab prove ")[1].split())
    until(lambda: len(proof.results) > n, 120)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert digests(proof).items() >= before.items()


# how it begins, and how it ends

def test_it_says_that_it_begins_at_an_older_checkpoint(tmp_path, capsys):
    "Where the newest one is damaged: on the terminal and in the run's log; the first line says from which step."
    run = trained(tmp_path / "s3=x y", save_every=3)
    (run / "checkpoints/step_00000004.pt").write_bytes(b"torn")
    assert main(["prove", str(run), "lower_lr", "--steps", "1", "--seeds", "3", "--aa", "6", "--no-scores", "--draws", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning: checkpoint step_00000004.pt is damaged: its SHA-256") and lines[0].endswith("the proof begins at step 3")
    assert lines[1].startswith("proof 001-lower_lr, from step 3: 6 to 18 arms of 1 step ")
    told, = [e for e in Run(run).events("proof") if e.level == "warning"]
    assert told.text.startswith("proof 001-lower_lr begins at step 3, which is older: checkpoint step_00000004.pt is damaged") and told.step == 3


def test_a_metric_that_there_is_not(tmp_path):
    "Nothing is left of its proof, and the nearest name is given; a proof in a process of its own says in the run why it failed."
    run = trained(tmp_path / "first")
    said = []
    asked = dict(knobs=dict(lr=1e-5), metric="los", **QUICK | dict(say=said.append))
    with pytest.raises(UnknownName, match="unknown metric of the arms 'los'; did you mean 'loss'"): prove(run, **asked)
    assert not said and not proofs_of(run) and not Run(run).events("proof")
    proof = prove(run, **asked | dict(process=True))
    with pytest.raises(UserError, match="unknown metric of the arms"): proof.wait(120)
    told = Run(run).events("proof")
    assert [e.level for e in told] == ["info", "error"] and told[-1].text.startswith("proof 001-lr=1e-05 failed: NoSuchMetric: unknown metric of the arms 'los'")


def test_a_closed_pipe_stops_it(tmp_path):
    "As of `| head -2`: its arms are kept, it is stopped and not failed, and nothing is complained of."
    run = trained(tmp_path / "first")
    process = proving(run, "--set", "lr=1e-5", "--seeds", 7, "--aa", 6, "--steps", 4, "--no-scores", "--draws", 1)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 1
    proof, = proofs_of(run)
    assert proof.state == "stopped" and len(proof.results) in (1, 2) and not proof.run.events("error")
    assert not [e for e in Run(run).events("proof") if e.level == "error"]
    command = f"{sys.executable} -m medlab prove '{proof.path}' | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert not done.stderr and proof.state == "stopped", done.stderr
    make_proof(proof.path)
    assert proof.state == "done"


def test_a_stop_in_the_first_step_of_an_arm(tmp_path, monkeypatch):
    "Before the arm's knobs are in force: the proof is stopped, and has not failed; it goes on later."
    run = trained(tmp_path / "first")
    proof = new_proof(run, knobs=dict(lr=1e-5), pairs=3, aa=6, steps=2, scores=False, draws=1)
    change = Trainer.set
    def set_and_stop(self, *args, source=None, **knobs):
        if str(source).startswith("proof, lr=1e-05 2"):
            proof.stop()
            self.writer.store.look()  # it is heard before the step
        return change(self, *args, source=source, **knobs)
    with monkeypatch.context() as m:
        m.setattr(Trainer, "set", set_and_stop)
        make_proof(proof.path)
    assert proof.state == "stopped" and not proof.run.events("error") and not [e for e in Run(run).events("proof") if e.level == "error"]
    before = digests(proof)
    assert ("lr=1e-05", 1) in before and ("lr=1e-05", 2) not in before
    make_proof(proof.path)
    assert proof.state == "done" and digests(proof).items() > before.items()


def test_one_proof_in_two_processes(tmp_path, capsys):
    "The second is told that it is being made, and how to stop it."
    run = trained(tmp_path / "first")
    proof = new_proof(run, knobs=dict(lr=1e-5), pairs=7, aa=6, steps=40, scores=False, draws=1)
    with Trainer(tiny(), proof.path, resume=True, threads=1, val_share=0.0):
        assert main(["prove", str(proof.path)]) == 2
        with pytest.raises(UserError, match="001-lr=1e-05 is being made already; wait for it, or stop it: "): begin(proof)
    told = capsys.readouterr().err
    assert "proof 001-lr=1e-05 is being made already; wait for it, or stop it: Proof(" in told and "directory" not in told


def test_the_way_back_is_named(tmp_path):
    "Of knobs that are in force, and were others before."
    run = trained(tmp_path / "first", lr=1e-3)
    with pytest.raises(UserError, match="lr=0.001 is in force already at step 4 of first, .* prove another value$"):
        new_proof(run, knobs=dict(lr=1e-3))
    with Trainer(tiny(), run, resume=True, threads=1) as t:
        t.set(lr=2e-4)
        t.fit(2, progress=False)
    with pytest.raises(UserError, match="lr=0.0002 is in force already at step 6 of first, .* the way back: --set lr=0.001$"):
        new_proof(run, knobs=dict(lr=2e-4))


SCRIPT = """
from medlab import recipes
from medlab.core import UnknownName, UserError
from medlab.train.trainer import Trainer
from medlab.prove.start import prove_of
class Mine(recipes.Restoration): pass
if __name__ == "__main__":
    t = Trainer(Mine(**recipes.Restoration.tiny | dict(image_size=(16, 16), blocks=(1,))), "first", threads=1, val_share=0.0)
    t.fit(4, progress=False)
    for fix in ("lowr_lr", "lower_lr"):
        try: prove_of(t, fix, steps=1, seeds=3, aa=6, scores=False, draws=1)
        except UserError as e: print(e)
    print(prove_of(t, "lower_lr", steps=1, seeds=3, aa=6, scores=False, draws=1, process=False).state)
    t.close()
"""


def test_a_recipe_of_the_script_itself(tmp_path):
    "A fix that there is not comes first; then the ways that work are named, and do."
    (tmp_path / "mine_here.py").write_text(SCRIPT)
    run = lambda *words: subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240, env=os.environ | dict(OMP_NUM_THREADS="1"))
    said = run("mine_here.py")
    assert "unknown fix of first 'lowr_lr'" in said.stdout and said.stdout.endswith("\ndone\n"), said
    assert "Mine was defined in a notebook or a script" in said.stdout and "or: prove(…, process=False)" in said.stdout, said
    assert "in a terminal goes medlab prove first lower_lr" in said.stdout, said
    again = run("-m", "medlab", "prove", "first", "clip_norm", "--steps", "1", "--seeds", "3", "--aa", "6", "--no-scores", "--draws", "1")
    assert again.returncode == 0, again


# what is asked of the arms is the same question

ASKED = [("segmentation", ["boundary_loss"], None, dict(surface_weight=0.0)), ("segmentation", ["staggered_surface"], None, dict(surface_weight=0.5)),
    ("restoration", ["loss_norm"], None, {}), ("restoration", [], dict(fft_weight=3.0), {})]


@pytest.mark.parametrize("name, fixes, change, knobs", ASKED, ids=["boundary_loss", "staggered_surface", "loss_norm", "fft_weight"])
def test_a_fix_of_the_loss_is_judged_without_it(tmp_path, name, fixes, change, knobs):
    "Arms that learn nothing answer alike, whatever the fix makes of the loss that they trained with; and the proof says that it is another loss."
    path = trained(tmp_path / "first", tiny(name), lr=1e-3, **knobs)
    fork = fork_run(path, knobs=dict(lr=1e-9), name="still")
    with Trainer.open(fork.path, threads=1) as t: t.fit(1, progress=False)
    proof = prove(fork.path, *fixes, knobs=change, aa=0, pairs=6, **QUICK | dict(steps=2))
    off, on = (next(r for r in proof.results if r.factor == f) for f in ("off", proof.plan.factors[0].name))
    assert on.metrics["loss"] == pytest.approx(off.metrics["loss"], rel=1e-4)
    assert any("changes the loss itself" in e.text for e in proof.run.events())
    proof.close()
    fork.close()
