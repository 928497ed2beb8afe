"""A run is copied elsewhere while it trains: nothing that fails there reaches training, and the copy alone is enough to go on.

The long form: MEDLAB_MIRROR_GB=10 MEDLAB_MIRROR_KILLS=30 python -m pytest -n0 -s nbs/tests/test_mirror.py -k "kills or memory"
"""
import importlib.util
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from s3_server import KEYS, Server
from victim import digest
from waiting import until

from medlab.cli.main import main
from medlab.core import UserError
from medlab.mirror import places
from medlab.mirror.fetch import fetch, fetch_state
from medlab.mirror.mirror import Mirror
from medlab.mirror.places import place_at
from medlab.mirror.sender import Sender
from medlab.mirror.states import manifests, read_manifest
from medlab.run.checkpoint import refuse_damaged
from medlab.run.directory import Run
from medlab.train.child import work
from medlab.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent / "process"))
from toys import Toy, equal, weights  # noqa: E402

HERE = Path(__file__).parent
KILLS = int(os.environ.get("MEDLAB_MIRROR_KILLS", 2))  # 30 for the long form
GB = float(os.environ.get("MEDLAB_MIRROR_GB", 0.1))  # that are sent, at least; 10 for the long form
MISSING = [n for n in ("moto", "s3fs", "flask") if importlib.util.find_spec(n) is None]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install 'moto[server]' s3fs brings them")
QUICK = dict(pause=0.05, most=0.2)
CPU = dict(device="cpu", threads=1)


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.kill()


@pytest.fixture
def s3(server, monkeypatch, request):
    "(server, URL of a mirror in a bucket of its own)."
    for k, v in KEYS.items(): monkeypatch.setenv(k, v)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.proxy.url)
    monkeypatch.setattr(places, "_OPTIONS", dict(s3=dict(config_kwargs=dict(connect_timeout=2, read_timeout=5, retries=dict(max_attempts=0)))))
    monkeypatch.setattr(places, "BLOCK", 5 * 2**20)  # the smallest part that S3 takes
    server.proxy.mode = "pass"
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    server.bucket(bucket)
    yield server, f"s3://{bucket}/run"
    server.proxy.mode = "pass"


def trainer(path, mirror, resume=False, **kw):
    "A trainer on the CPU whose run is mirrored."
    made = mirror if isinstance(mirror, Mirror) else Mirror(mirror, wait=30, **QUICK)
    return Trainer(Toy(), path, resume=resume, mirror=made, **CPU, **({} if resume else dict(save_every=5)) | kw)


def newest_of(mirror):
    "The newest state of a mirror."
    place = place_at(mirror)
    return read_manifest(place, manifests(place)[0])


def arrived(t): until(lambda: t.mirror.done == t.mirror.written, 60)


def told(path): return [(e.level, e.text) for e in Run(path).events("mirror")]


def refuse_flood(path, most=12):
    "What happened was told, and no more than that."
    texts = told(path)
    assert len(texts) <= most, texts


def whole_states(mirror, folder):
    "Steps of the states in a mirror, newest first, each of them fetched and compared by hash."
    place, steps = place_at(mirror), []
    for name in manifests(place):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = read_manifest(place, name)
        assert fetch_state(place, state, folder) == [], "nothing is left out"
        steps.append(state.step)
    return steps


# ---------------------------------------------------------------------------------------------------------- a directory

def test_training_does_not_wait_for_a_place_that_hangs(tmp_path, capsys):
    "A place that never answers costs a training of 60 steps nothing but what is asked for at its end."
    class Hangs:
        def __str__(self): return "s3://hangs"
        def __getattr__(self, name): return lambda *args: time.sleep(1000)
    mirror = Mirror(tmp_path / "m", wait=0.5, patience=0.3)
    mirror.place = Hangs()
    start = time.monotonic()
    with trainer(tmp_path / "run", mirror) as t:
        began = time.monotonic() - start
        t.fit(until=60, progress=False)
        took, end = time.monotonic() - start, time.monotonic()
    assert began < 10 and took < 30 and time.monotonic() - end < 5 and Run(tmp_path / "run").state == "done"
    texts = told(tmp_path / "run")
    assert any("checkpoints behind" in t for _, t in texts) and "did not reach the mirror s3://hangs within 0.5 s" in texts[-1][1]
    err = capsys.readouterr().err
    assert "does not answer" in err and "waiting up to 0.5 s" in err and "did not reach" in err


def flip(place, sha, at=-1):
    "Flip a bit of an object of a folder."
    file = place.path / "objects" / sha
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("fault", ["database", "checkpoint", "missing", "short", "manifest"])
def test_a_damaged_state_is_refused_and_the_one_before_is_taken(tmp_path, monkeypatch, fault):
    monkeypatch.setattr("medlab.mirror.fetch.PAUSES", (0.0, 0.0))
    with trainer(tmp_path / "run", tmp_path / "m", keep=9) as t:
        for until_ in (10, 20):
            t.fit(until=until_, progress=False)
            arrived(t)
    place = place_at(tmp_path / "m")
    newest = newest_of(tmp_path / "m")
    database = lambda state: next(e.sha256 for e in state.files if e.name == "run.db")
    share = [*itertools.takewhile(lambda s: database(s) == database(newest), (read_manifest(place, m) for m in manifests(place)))]  # nothing was written between two states
    if fault == "database": flip(place, database(newest))
    if fault == "checkpoint": flip(place, newest.newest)
    if fault == "missing": (place.path / "objects" / newest.newest).unlink()
    if fault == "short": os.truncate(place.path / "objects" / newest.newest, 1000)
    if fault == "manifest": (place.path / "manifests" / manifests(place)[0]).write_bytes(b"{}")
    lines = []
    fetched = fetch(place, tmp_path / "fetched", lines.append)
    refused = [line for line in lines if "is refused" in line]
    step = Run(fetched).checkpoints()[-1]["step"]
    if fault in ("database", "manifest"): assert len(refused) == (len(share) if fault == "database" else 1), (refused, share)
    else: assert refused and step < 20
    assert len([t for level, t in told(fetched) if level == "warning"]) == len(refused), "the run's log has it"
    with trainer(fetched, tmp_path / "m", resume=True, save_every=5) as t: t.fit(until=25, progress=False)
    again = fetch(place, tmp_path / "again", lines.append)
    assert "is refused" not in lines[-2] and [c["step"] for c in Run(again).checkpoints()][-2:] == [20, 25], "also where the same bits were trained again"
    for c in Run(again).checkpoints(): refuse_damaged(again / "checkpoints" / c["file"], c["sha256"])


def test_a_full_disk_is_told_and_recovers(tmp_path, monkeypatch):
    full, write = threading.Event(), places.write_durably
    def written(path, call):
        if full.is_set(): raise OSError(28, "No space left on device", str(path))
        write(path, call)
    monkeypatch.setattr(places, "write_durably", written)
    with trainer(tmp_path / "run", tmp_path / "m") as t:
        t.fit(until=10, progress=False)
        arrived(t)
        full.set()
        t.fit(until=40, progress=False)
        until(lambda: any("No space left" in text for _, text in told(t.path)), 30)
        full.clear()
    texts = [text for _, text in told(tmp_path / "run")]
    assert any("No space left on device; training goes on" in x for x in texts) and any("is up to date again" in x for x in texts)
    refuse_flood(tmp_path / "run")
    assert Run(fetch(tmp_path / "m", tmp_path / "new", lambda _: None)).checkpoints()[-1]["step"] == 40


def test_two_runs_and_one_mirror(tmp_path):
    with trainer(tmp_path / "a", tmp_path / "m") as t: t.fit(until=10, progress=False)
    with pytest.raises(UserError, match="is another run's, .*/a, at step 10: choose another place"): trainer(tmp_path / "b", tmp_path / "m")
    assert not (tmp_path / "b").exists(), "refused before anything was touched"
    with Trainer(Toy(), tmp_path / "c", **CPU) as t: t.fit(until=5, progress=False)
    with pytest.raises(UserError, match="is another run's"): trainer(tmp_path / "c", tmp_path / "m", resume=True)
    with trainer(tmp_path / "a", tmp_path / "m", resume=True) as t: t.fit(until=15, progress=False)  # the run itself may
    assert newest_of(tmp_path / "m").step == 15


def test_an_attempt_that_saved_nothing_does_not_hold_the_mirror(tmp_path):
    with trainer(tmp_path / "a", tmp_path / "m") as t: arrived(t)
    with pytest.raises(UserError, match="is another run's, .*/a, at step 0"): trainer(tmp_path / "b", tmp_path / "m")
    with trainer(tmp_path / "a", tmp_path / "m") as t: t.fit(until=5, progress=False)
    assert newest_of(tmp_path / "m").step == 5 and Run(tmp_path / "a").state == "done"


def test_here_or_there(tmp_path):
    "A run here that is newer wins; one that lacks what the mirror holds is refused."
    with trainer(tmp_path / "a", tmp_path / "m") as t: t.fit(until=10, progress=False)
    shutil.copytree(tmp_path / "a", tmp_path / "behind")
    with Trainer(Toy(), tmp_path / "a", resume=True, **CPU) as t: t.fit(until=20, progress=False)
    lines = []
    with trainer(tmp_path / "a", Mirror(tmp_path / "m", say=lines.append), resume=True) as t: assert t.iteration == 20
    assert any("at step 20 as it is here; the mirror holds step 10" in x for x in lines)
    with pytest.raises(UserError, match="holds step 20 of this run.*which .*behind has not.*newest checkpoint is of step 10.*--run ANOTHER"): trainer(tmp_path / "behind", tmp_path / "m", resume=True)


def test_the_later_process_has_the_mirror(tmp_path):
    "A machine that was taken for dead wakes up: its run trains on, and overwrites nothing."
    with trainer(tmp_path / "a", tmp_path / "m") as old:
        old.fit(until=10, progress=False)
        arrived(old)
        with trainer(tmp_path / "b", tmp_path / "m", resume=True) as new: new.fit(until=20, progress=False)
        old.fit(until=15, progress=False)
    assert "has the mirror" in told(tmp_path / "a")[-1][1] and "is mirrored no more" in told(tmp_path / "a")[-1][1]
    assert newest_of(tmp_path / "m").step == 20 and Run(tmp_path / "a").step == 15


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = "--device", "cpu", "--threads", "1"
    assert main(["train", "restoration", "--debug", "--steps", "4", "--save_every", "2", "--run", "a run", "--mirror", "the mirror", *few]) == 0
    shutil.rmtree("a run")
    assert main(["train", "--resume", "--mirror", "the mirror", "--run", "new", "--steps", "6", *few]) == 0
    out = capsys.readouterr().out
    assert "fetched step 4" in out and "step 4 → 6" in out and newest_of("the mirror").step == 6
    assert main(["train", "restoration", "--debug", "--run", "other", "--mirror", "the mirror", *few]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is another run's" in err and not Path("other").exists()
    assert main(["train", "--resume", "--mirror", "none", "--run", "other"]) == 2 and "is empty; look at its name" in capsys.readouterr().err
    assert main(["train", "restoration", "--debug", "--run", "other", "--mirror", "s3://me:secret@bucket/run"]) == 2
    err = capsys.readouterr().err
    assert "holds a password" in err and "secret" not in err and not Path("other").exists()
    def away(sender): raise OSError("the place is away")
    monkeypatch.setattr(Sender, "push", away)
    assert main(["train", "restoration", "--debug", "--steps", "2", "--run", "third", "--mirror", "third mirror", "--mirror-wait", "1", *few]) == 1
    assert Run("third").state == "done" and "did not reach the mirror" in capsys.readouterr().err, "a job whose disk goes away with it has not done its work"


def test_a_process_of_its_own_goes_on_with_the_mirror(tmp_path, monkeypatch):
    from medlab.recipes.restoration import Restoration
    recipe = Restoration(image_size=(32, 32), dim=8, blocks=(1,), refinement=0, batch_size=2, phantoms=8)
    t = Trainer(recipe, tmp_path / "run", save_every=2, mirror=str(tmp_path / "m"), **CPU)
    t.fit(steps=2, progress=False)
    jobs = []
    monkeypatch.setattr("medlab.train.process.spawn", lambda path, job, **meta: jobs.append(job))
    t.start(process=True, until=6)
    assert work(**jobs[0]) == 0 and newest_of(tmp_path / "m").step == 6, "what the process does"


def test_rank_0_alone_has_the_mirror(tmp_path, monkeypatch):
    "A run is fetched once for all ranks; rank 0 is killed, and goes on with the mirror."
    monkeypatch.chdir(tmp_path)
    both = ["--device", "cpu", "--threads", "1", "--mirror", "m"]
    assert main(["train", "restoration", "--debug", "--gradient-accumulation-steps", "2", "--save-every", "5", "--run", "a", "--steps", "5", *both]) == 0
    shutil.rmtree("a")
    command = [sys.executable, "-W", "ignore", "-m", "medlab", "train", "--resume", "--run", "b", "--steps", "40", "--processes", "2", "--restarts", "1", *both]
    made = subprocess.Popen(command, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: made.poll() is not None or newest_of("m").step > 5, 120)
        assert made.poll() is None, made.communicate()
        next(p for p in psutil.Process(made.pid).children(recursive=True) if p.environ().get("RANK") == "0").kill()
        out, err = made.communicate(timeout=240)
    finally: made.kill()
    assert made.returncode == 0 and newest_of("m").step == 40 and out.count("fetched step 5") == 1, err[-2000:]
    assert any("going on after step" in e.text for e in Run("b").events("resume")[1:]) and not told("b/ranks/1"), "the other rank knows of no mirror"


# --------------------------------------------------------------------------------------------------------- an S3 server

@needs_s3
def test_the_copy_alone_gives_the_same_bits(s3, tmp_path):
    with Trainer(Toy(), tmp_path / "whole", save_every=5, **CPU) as t: t.fit(until=40, progress=False); whole = weights(t)
    _, url = s3
    with trainer(tmp_path / "half", url) as t: t.fit(until=20, progress=False)
    with trainer(tmp_path / "elsewhere", url, resume=True) as t:
        assert t.iteration == 20
        t.fit(until=40, progress=False)
        assert equal(weights(t), whole)
    run = Run(tmp_path / "elsewhere")
    assert run.metrics("loss")["loss"].step.tolist() == list(range(1, 41)) and (tmp_path / "elsewhere/config.yml").exists()
    with pytest.raises(UserError, match="is another run's, .*half|is another run's, .*elsewhere"): trainer(tmp_path / "b", url)
    assert len(manifests(place_at(url))) == 3 and whole_states(url, tmp_path / "looked")[0] == 40
    refuse_flood(tmp_path / "elsewhere")


@needs_s3
def test_s3_that_fails_and_comes_back(s3, tmp_path, monkeypatch):
    server, url = s3
    monkeypatch.setattr(places, "STALL", 2.0)
    before = {*threading.enumerate()}
    with trainer(tmp_path / "run", url) as t:
        for i, mode in enumerate(("500", "403", "cut", "hang", "down"), 1):
            arrived(t)
            if mode == "down": server.proxy.down()
            else: server.proxy.mode = mode
            start = time.monotonic()
            t.fit(until=10 * i, progress=False)
            assert time.monotonic() - start < 30 and t.run.state == "done", "training goes on"
            until(lambda: t.mirror.teller.since is not None, 60)
            server.proxy.mode = "pass"
            if mode == "down": server.proxy.up()
    monkeypatch.setattr(places, "STALL", 60.0)
    texts = told(tmp_path / "run")
    assert sum("nothing reaches the mirror" in x for _, x in texts) >= 5 and "is up to date again" in texts[-1][1], texts
    assert any(level == "error" and "training goes on, and it is tried again" in x for level, x in texts), "403 is a mistake"
    refuse_flood(tmp_path / "run", 24)
    assert whole_states(url, tmp_path / "looked")[0] == 50
    assert not [x for x in {*threading.enumerate()} - before if x.name == "medlab-mirror-call"], "no call hangs for ever"


@needs_s3
def test_an_upload_that_is_stuck_is_given_up(s3, monkeypatch):
    "No timeout of the libraries ends it: the server has the connection open, and takes nothing."
    server, url = s3
    monkeypatch.setattr(places, "STALL", 2.0)
    place, before, start = place_at(url), {*threading.enumerate()}, time.monotonic()
    def pieces():
        for i in range(16):
            if i == 6: server.proxy.mode = "stuck"
            yield bytes(2**22)
    with pytest.raises(TimeoutError, match="no answer within 2 s"): place.write("objects/a", pieces(), 2**26)
    assert time.monotonic() - start < 20
    server.proxy.mode = "pass"
    until(lambda: not [x for x in {*threading.enumerate()} - before if x.name == "medlab-mirror-call"], 20)
    place.sweep()
    assert place.names("objects") == {} and "Uploads" not in place.fs.call_s3("list_multipart_uploads", Bucket=url.split("/")[2])
    place.write("objects/a", [bytes(2**22)] * 3, 3 * 2**22)
    assert place.names("objects") == {"a": 3 * 2**22}


@needs_s3
def test_s3_mistakes_are_told_before_training(s3, tmp_path):
    server, url = s3
    with pytest.raises(UserError, match="cannot be used: .*bucket.*mend that"): trainer(tmp_path / "run", "s3://no-such-bucket/run")
    server.proxy.mode = "403"
    with pytest.raises(UserError, match="cannot be used: .*mend that"): trainer(tmp_path / "run", url)
    assert not (tmp_path / "run").exists()


@needs_s3
def test_an_upload_that_goes_while_it_is_swept_up_is_no_error(s3, monkeypatch):
    _, url = s3
    place, bucket = place_at(url), url.split("/")[2]
    begin = lambda: place.fs.call_s3("create_multipart_upload", Bucket=bucket, Key="run/objects/a")["UploadId"]
    uploads, call = [begin(), begin()], place.fs.call_s3
    def aborted_before(method, **kw):
        if method == "abort_multipart_upload" and kw["UploadId"] == uploads[0]: call(method, **kw)
        return call(method, **kw)
    monkeypatch.setattr(place.fs, "call_s3", aborted_before)
    with pytest.raises(FileNotFoundError): aborted_before("abort_multipart_upload", Bucket=bucket, Key="run/objects/a", UploadId=uploads[0])
    uploads[0] = begin()
    place.sweep()
    assert "Uploads" not in call("list_multipart_uploads", Bucket=bucket)


@needs_s3
def test_s3_keeps_no_half_of_an_upload(s3, tmp_path):
    _, url = s3
    place, bucket = place_at(url), url.split("/")[2]
    for key in ("run/objects/abc", "another/abc"): place.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    with trainer(tmp_path / "run", url) as t: t.fit(until=5, progress=False)
    assert [u["Key"] for u in place.fs.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]] == ["another/abc"], "others' stay"


# ------------------------------------------------------------------------------------------------------------- kill -9

def test_kills_of_the_training_leave_a_mirror_that_is_enough(tmp_path, request):
    "Each time nothing but the mirror is left."
    url = tmp_path / "m" if MISSING else request.getfixturevalue("s3")[1]
    draw, begun, came, run = random.Random(3), [], [], tmp_path / "run"
    for i in range(KILLS):
        process = subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / "mirror_victim.py"), str(run), str(url)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = process.stdout.readline()
        assert line, process.stderr.read()[-2000:]
        begun.append(int(line.split()[1]))
        if i == 0: until(lambda: manifests(place_at(url)) and newest_of(url).step, 60)
        time.sleep(draw.uniform(0.0, 1.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        shutil.rmtree(run)
        steps = whole_states(url, tmp_path / "looked")
        assert steps and steps == sorted(steps, reverse=True) and steps[0] >= max([begun[-1], *came]), (steps, begun)
        came.append(steps[0])
    assert begun[1:] == came[:-1], "each began where the mirror stood"
    from mirror_victim import open_run
    digests = []
    for name, mirror in (("again", url), ("whole", tmp_path / "m2")):
        with open_run(tmp_path / name, mirror) as t:
            t.fit(until=came[-1] + 15, progress=False)
            digests.append(digest(t.state.state_dict()))
    assert digests[0] == digests[1], "to the bit"
    print(f"{KILLS} kills of the training; the mirror stood at {came}")


@dataclass
class Bulky(Toy):
    "Checkpoints of some size, which differ in all of their bytes."
    numbers: int = 1000
    name = "bulky"

    def build_model(self):
        model = super().build_model()
        model.register_buffer("bulk", torch.randn(self.numbers, generator=torch.Generator().manual_seed(0)))
        return model

    def losses(self, model, batch):
        model.bulk.mul_(1.0001)
        return super().losses(model, batch)


class Watched:
    "The most memory of this process, in bytes, while it lasts."

    def __enter__(self):
        self.process, self.over = psutil.Process(), threading.Event()
        self.before = self.most = self.process.memory_info().rss
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.over.wait(0.02): self.most = max(self.most, self.process.memory_info().rss)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    @property
    def grown(self): return (self.most - self.before) / 2**20


def refuse_unfit(mirror, folder):
    "Fetch the run, compare all hashes, and return its step."
    fetched = fetch(mirror, folder, lambda _: None)
    for c in (listed := Run(fetched).checkpoints()): refuse_damaged(fetched / "checkpoints" / c["file"], c["sha256"])
    assert not [text for _, text in told(fetched) if "is refused" in text], "the newest is whole"
    shutil.rmtree(folder)
    return listed[-1]["step"]


def pester(server, url, t, kills, folder):
    "Kill and slow the server, each so many times, while a trainer sends to it; each kill loses all that it held."
    draw, start = random.Random(5), time.monotonic()
    for i in range(kills):
        server.proxy.mode, server.proxy.delay = "slow", draw.uniform(0.001, 0.01)
        at = server.proxy.taken
        until(lambda: server.proxy.taken > at + 2**20, 900)  # within an upload
        time.sleep(draw.uniform(0.0, 0.1))
        server.kill()
        until(lambda: t.mirror.teller.since is not None, 900)
        server.start()
        server.bucket(url.split("/")[2])
        server.proxy.mode = "pass"
        until(lambda: t.mirror.teller.since is None, 900)
        step = refuse_unfit(url, folder)
        print(f"kill {i + 1}: {server.proxy.taken / 1e9:.2f} GB in {time.monotonic() - start:.0f} s; fetched step {step}", flush=True)


@needs_s3
@pytest.mark.timeout(7200)
def test_kills_of_the_server_leave_a_mirror_that_is_enough(s3, tmp_path, monkeypatch):
    server, url = s3
    monkeypatch.setattr(places, "STALL", 20.0)
    recipe, failures, start = Bulky(numbers=int(GB / KILLS * 1e9 / 12)), [], time.monotonic()
    mirror = Mirror(url, wait=600, pause=0.2, most=1.0)
    t = Trainer(recipe, tmp_path / "run", mirror=mirror, save_every=50, keep=3, **CPU)
    failed, size = t.mirror.teller.failed, 0
    t.mirror.teller.failed = lambda error: (failures.append(repr(error)), failed(error))
    until(lambda: t.mirror.last, 300)
    sent = server.proxy.taken
    one = t.loop.one
    t.loop.one = lambda: (time.sleep(0.05), one())[1]
    with Watched() as memory:
        t.start()
        pester(server, url, t, KILLS, tmp_path / "looked")
        while server.proxy.taken - sent < GB * 1e9: time.sleep(0.1)
        t.stop()
        t.wait(900)
        t.close()
    expected, step, size = weights(t), t.iteration, Run(t.path).checkpoints()[-1]["bytes"]
    texts, gb, seconds = told(t.path), (server.proxy.taken - sent) / 1e9, time.monotonic() - start
    shutil.rmtree(t.path)
    steps = whole_states(url, tmp_path / "looked")
    fetched = fetch(url, tmp_path / "empty", print)
    for c in Run(fetched).checkpoints(): refuse_damaged(fetched / "checkpoints" / c["file"], c["sha256"])
    with Trainer(recipe, fetched, resume=True, **CPU) as again:
        assert again.iteration == step == steps[0] and equal(weights(again), expected), "to the bit"
    print(f"{gb:.2f} GB sent in checkpoints of {size / 1e6:.1f} MB, {KILLS} kills of the server and {KILLS} times slow, {len(failures)} attempts failed, "
          f"{len(texts)} events, {seconds:.0f} s, {memory.grown:.0f} MiB more memory; states at {steps}")
    assert len(failures) >= KILLS and "is up to date again" in texts[-1][1] and gb >= GB


@pytest.mark.timeout(7200)
def test_memory_is_bounded(tmp_path, request):
    "A checkpoint that is far larger than what is in memory of it."
    url = tmp_path / "m" if MISSING or GB < 1 else request.getfixturevalue("s3")[1]
    with Trainer(Bulky(numbers=int(max(0.2, GB / 5) * 1e9 / 4)), tmp_path / "run", **CPU) as t: file = t.save()
    place, size = place_at(url), file.stat().st_size
    del t
    with Watched() as memory:
        state = Sender(place, tmp_path / "run").push()
        fetched = fetch(place, tmp_path / "new", lambda _: None)
    print(f"{size / 1e6:.0f} MB sent and fetched, {memory.grown:.0f} MiB more memory")
    assert Run(fetched).checkpoints()[0]["sha256"] == state.newest and memory.grown < 120
