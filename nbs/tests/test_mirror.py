"""A run is copied elsewhere while it trains: nothing that fails there reaches training, and the copy alone is enough to go on."""
import hashlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from s3_server import KEYS, Server
from waiting import until

from medlab.core import UserError
from medlab.mirror.fetch import fetch, fetch_state
from medlab.mirror.mirror import Mirror
from medlab.mirror.places import place_at
from medlab.mirror.sender import Sender
from medlab.mirror.states import manifests, read_manifest
from medlab.run.checkpoint import CheckpointManager, refuse_damaged
from medlab.run.directory import Run
from medlab.run.writer import RunWriter
from medlab.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent / "process"))
from toys import Toy, equal, weights  # noqa: E402

HERE = Path(__file__).parent
KILLS = int(os.environ.get("MEDLAB_MIRROR_KILLS", 10))  # 30 for the long test
GB = float(os.environ.get("MEDLAB_MIRROR_GB", 0.06))  # 10 for the long test
MISSING = [n for n in ("moto", "s3fs", "flask") if importlib.util.find_spec(n) is None]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install 'moto[server]' s3fs brings them")
QUICK = dict(pause=0.05, most=0.2)


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
    monkeypatch.setattr("medlab.mirror.places._OPTIONS", dict(s3=dict(config_kwargs=dict(connect_timeout=2, read_timeout=3, retries=dict(max_attempts=0)))))
    server.proxy.mode = "pass"
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    server.bucket(bucket)
    yield server, f"s3://{bucket}/run"
    server.proxy.mode = "pass"


def trainer(path, mirror, resume=False, **kw):
    "A trainer on the CPU whose run is mirrored."
    made = mirror if isinstance(mirror, Mirror) else Mirror(mirror, wait=30, **QUICK)
    return Trainer(Toy(), path, resume=resume, device="cpu", threads=1, mirror=made, **({} if resume else dict(save_every=5)) | kw)


def newest_of(mirror):
    "The newest state of a mirror."
    place = place_at(mirror)
    return read_manifest(place, manifests(place)[0])


def told(path): return [(e.level, e.text) for e in Run(path).events("mirror")]


def refuse_flood(path, most=12):
    "What happened was told, and no more than that."
    texts = told(path)
    assert len(texts) <= most, texts


# ---------------------------------------------------------------------------------------------------------- a directory

def test_the_copy_alone_gives_the_same_bits(tmp_path):
    with trainer(tmp_path / "whole", tmp_path / "m1") as t: t.fit(until=40, progress=False); whole = weights(t)
    with trainer(tmp_path / "half", tmp_path / "m2") as t: t.fit(until=20, progress=False)
    shutil.rmtree(tmp_path / "half")
    with trainer(tmp_path / "elsewhere", tmp_path / "m2", resume=True) as t:
        assert t.iteration == 20 and t.run.state == "done"
        t.fit(until=40, progress=False)
        assert equal(weights(t), whole)
    run = Run(tmp_path / "elsewhere")
    assert run.metrics("loss")["loss"].step.tolist() == list(range(1, 41)) and (tmp_path / "elsewhere/config.yml").exists()
    assert newest_of(tmp_path / "m2").step == 40 and len(manifests(place_at(tmp_path / "m2"))) == 3
    refuse_flood(run.path)


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


@pytest.mark.parametrize("fault", ["none", "database", "checkpoint", "missing", "short", "manifest", "word"])
def test_a_damaged_state_is_refused_and_the_one_before_is_taken(tmp_path, fault):
    with trainer(tmp_path / "run", tmp_path / "m", keep=9) as t:
        for until_ in (10, 20):
            t.fit(until=until_, progress=False)
            until(lambda: t.mirror.done == t.mirror.written, 30)
    place = place_at(tmp_path / "m")
    states = [read_manifest(place, n) for n in manifests(place)]
    newest, states = states[0], [s for s in states if s.checkpoint]
    older = {e.sha256 for s in states if s.step < newest.step for e in s.files}
    database = next(e.sha256 for e in newest.files if e.name == "run.db")
    if fault == "database": flip(place, database)
    if fault == "checkpoint": flip(place, newest.newest)
    if fault == "missing": (place.path / "objects" / newest.newest).unlink()
    if fault == "short": os.truncate(place.path / "objects" / newest.newest, 1000)
    if fault == "manifest": (place.path / "manifests" / manifests(place)[0]).write_bytes(b"{}")
    if fault == "word": (place.path / "newest.json").write_bytes(b"torn")
    lines = []
    fetched = fetch(place, tmp_path / "fetched", lines.append)
    refused = [line for line in lines if "is refused" in line]
    step = Run(fetched).checkpoints()[-1]["step"]
    if fault in ("none", "word"): assert not refused and step == 20
    elif fault in ("database", "manifest"): assert len(refused) == 1
    else: assert refused and step < 20 and newest.newest not in older
    assert len([t for level, t in told(fetched) if level == "warning"]) == len(refused), "the run's log has it"
    with trainer(fetched, tmp_path / "m", resume=True, save_every=5) as t: t.fit(until=25, progress=False)
    again = fetch(place, tmp_path / "again", lines.append)
    assert "is refused" not in lines[-2] and [c["step"] for c in Run(again).checkpoints()][-2:] == [20, 25], "also where the same bits were trained again"
    for c in Run(again).checkpoints(): refuse_damaged(again / "checkpoints" / c["file"], c["sha256"])


def test_a_full_disk_is_told_and_recovers(tmp_path, monkeypatch):
    from medlab.mirror import places
    full, write = threading.Event(), places.write_durably
    def written(path, call):
        if full.is_set(): raise OSError(28, "No space left on device", str(path))
        write(path, call)
    monkeypatch.setattr(places, "write_durably", written)
    with trainer(tmp_path / "run", tmp_path / "m") as t:
        t.fit(until=10, progress=False)
        until(lambda: t.mirror.last and t.mirror.last.step == 10, 30)
        full.set()
        t.fit(until=40, progress=False)
        t.writer.store.flush()
        until(lambda: any("No space left" in text for _, text in told(t.path)), 30)
        full.clear()
    texts = [text for _, text in told(tmp_path / "run")]
    assert any("No space left on device; training goes on" in x for x in texts) and any("is up to date again" in x for x in texts)
    refuse_flood(tmp_path / "run")
    assert Run(fetch(tmp_path / "m", tmp_path / "new", lambda _: None)).checkpoints()[-1]["step"] == 40


def test_two_runs_and_one_mirror(tmp_path):
    with trainer(tmp_path / "a", tmp_path / "m") as t: t.fit(until=10, progress=False)
    with pytest.raises(UserError, match="is another run's, 'a', whose newest state is of step 10: choose another place"): trainer(tmp_path / "b", tmp_path / "m")
    assert not (tmp_path / "b").exists(), "refused before anything was touched"
    with Trainer(Toy(), tmp_path / "c", device="cpu", threads=1) as t: t.fit(until=5, progress=False)
    with pytest.raises(UserError, match="is another run's"): trainer(tmp_path / "c", tmp_path / "m", resume=True)
    with trainer(tmp_path / "a", tmp_path / "m", resume=True) as t: t.fit(until=15, progress=False)  # the run itself may
    assert newest_of(tmp_path / "m").step == 15


def test_here_or_there(tmp_path):
    "A run here that is newer wins; one that lacks what the mirror holds is refused."
    with trainer(tmp_path / "a", tmp_path / "m") as t: t.fit(until=10, progress=False)
    shutil.copytree(tmp_path / "a", tmp_path / "behind")
    with Trainer(Toy(), tmp_path / "a", resume=True, device="cpu", threads=1) as t: t.fit(until=20, progress=False)
    lines = []
    with trainer(tmp_path / "a", Mirror(tmp_path / "m", say=lines.append), resume=True) as t: assert t.iteration == 20
    assert any("at step 20 as it is here; the mirror holds step 10" in x for x in lines)
    with pytest.raises(UserError, match="holds step 20 of this run.*which .*behind has not.*newest checkpoint is of step 10.*--run ANOTHER"): trainer(tmp_path / "behind", tmp_path / "m", resume=True)


def test_the_later_process_has_the_mirror(tmp_path):
    "A machine that was taken for dead wakes up: its run trains on, and overwrites nothing."
    with trainer(tmp_path / "a", tmp_path / "m") as old:
        old.fit(until=10, progress=False)
        until(lambda: old.mirror.done == old.mirror.written, 30)
        with trainer(tmp_path / "b", tmp_path / "m", resume=True) as new: new.fit(until=20, progress=False)
        old.fit(until=15, progress=False)
    assert "has the mirror" in told(tmp_path / "a")[-1][1] and "is mirrored no more" in told(tmp_path / "a")[-1][1]
    assert newest_of(tmp_path / "m").step == 20 and Run(tmp_path / "a").step == 15


def command(*words):
    "(exit status, standard output, standard error) of `medlab`."
    done = subprocess.run([sys.executable, "-m", "medlab", *map(str, words)], capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path):
    mirror, new = tmp_path / "m", tmp_path / "new"
    few = "--device", "cpu", "--threads", 1
    status, out, err = command("train", "restoration", "--debug", "--steps", 4, "--save_every", 2, "--run", tmp_path / "run", "--mirror", mirror, *few)
    assert status == 0, err
    shutil.rmtree(tmp_path / "run")
    status, out, err = command("train", "--resume", "--mirror", mirror, "--run", new, "--steps", 6, *few)
    assert status == 0 and "fetched step 4" in out and "step 4 → 6" in out, out + err
    assert newest_of(mirror).step == 6
    status, out, err = command("train", "restoration", "--debug", "--run", tmp_path / "other", "--mirror", mirror, *few)
    assert status == 2 and err.count("\n") == 1 and "is another run's, 'run'" in err and not (tmp_path / "other").exists(), err
    status, out, err = command("train", "--resume", "--mirror", tmp_path / "none", "--run", tmp_path / "other")
    assert status == 2 and "is empty; look at its name" in err


def test_a_process_of_its_own_goes_on_with_the_mirror(tmp_path):
    from medlab.recipes.restoration import Restoration
    recipe = Restoration(image_size=(32, 32), dim=8, blocks=(1,), refinement=0, batch_size=2, phantoms=8)
    t = Trainer(recipe, tmp_path / "run", device="cpu", threads=1, save_every=2, mirror=tmp_path / "m")
    t.fit(steps=2, progress=False)
    t.start(process=True, until=6)
    t.wait(200)
    until(lambda: newest_of(tmp_path / "m").step == 6, 60)


# ------------------------------------------------------------------------------------------------------------- kill -9

def victim(run, mirror, *rest, env=None):
    "Start the victim."
    return subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / "mirror_victim.py"), str(run), str(mirror), *map(str, rest)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(run, mirror, step, env=None):
    "The hash of the state after training to a step."
    out, err = (p := victim(run, mirror, "--until", step, env=env)).communicate(timeout=200)
    assert p.returncode == 0, err[-2000:]
    return out.split()[-1]


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


def kill_and_resume(tmp_path, mirror, kills, env=None):
    "Kill a training at random moments; each time nothing but the mirror is left. The last step, and how far each came."
    draw, begun, came = random.Random(3), [], []
    for i in range(kills):
        process = victim(tmp_path / "run", mirror, 0.004, env=env)
        line = process.stdout.readline()
        assert line, process.stderr.read()[-2000:]
        begun.append(int(line.split()[1]))
        if i == 0: until(lambda: manifests(place_at(mirror)), 60)
        time.sleep(draw.uniform(0.0, 1.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        shutil.rmtree(tmp_path / "run")
        steps = whole_states(mirror, tmp_path / "looked")
        assert steps and steps == sorted(steps, reverse=True) and steps[0] >= max([begun[-1], *came]), (steps, begun)
        came.append(steps[0])
    assert begun[1:] == came[:-1], "each began where the mirror stood"
    return came


def test_kills_leave_a_mirror_that_is_enough(tmp_path):
    came = kill_and_resume(tmp_path, tmp_path / "m", KILLS)
    assert len({*came}) > KILLS / 3, came
    last = finish(tmp_path / "again", tmp_path / "m", came[-1] + 15)
    assert last == finish(tmp_path / "whole", tmp_path / "m2", came[-1] + 15), "to the bit"
    print(f"{KILLS} kills; the mirror stood at {came}")


# --------------------------------------------------------------------------------------------------------- an S3 server

@needs_s3
def test_s3(s3, tmp_path):
    with trainer(tmp_path / "whole", tmp_path / "m1") as t: t.fit(until=40, progress=False); whole = weights(t)
    _, url = s3
    with trainer(tmp_path / "half", url) as t: t.fit(until=20, progress=False)
    with trainer(tmp_path / "elsewhere", url, resume=True) as t:
        assert t.iteration == 20
        t.fit(until=40, progress=False)
        assert equal(weights(t), whole)
    with pytest.raises(UserError, match="is another run's, 'half'"): trainer(tmp_path / "b", url)
    assert len(manifests(place_at(url))) == 3 and whole_states(url, tmp_path / "looked")[0] == 40
    refuse_flood(tmp_path / "elsewhere")


@needs_s3
@pytest.mark.parametrize("mode", ["drop", "500", "403", "cut", "down"])
def test_s3_that_fails_and_comes_back(s3, tmp_path, mode):
    server, url = s3
    with trainer(tmp_path / "run", url) as t:
        t.fit(until=10, progress=False)
        until(lambda: t.mirror.done == t.mirror.written, 60)
        if mode == "down": server.proxy.down()
        else: server.proxy.mode = mode
        start = time.monotonic()
        t.fit(until=40, progress=False)
        assert time.monotonic() - start < 30 and t.run.state == "done", "training goes on"
        until(lambda: t.mirror.teller.since is not None, 60)
        server.proxy.mode = "pass"
        if mode == "down": server.proxy.up()
        until(lambda: t.mirror.done == t.mirror.written, 60)
    texts = told(tmp_path / "run")
    assert any("nothing reaches the mirror" in x for _, x in texts) and "is up to date again" in texts[-1][1], texts
    if mode == "403": assert any(level == "error" for level, _ in texts)
    refuse_flood(tmp_path / "run")
    assert whole_states(url, tmp_path / "looked")[0] == 40


@needs_s3
def test_s3_that_is_slow(s3, tmp_path):
    server, url = s3
    server.proxy.mode, server.proxy.delay = "slow", 0.3
    with trainer(tmp_path / "run", Mirror(url, wait=1, **QUICK)) as t:
        start = time.monotonic()
        t.fit(until=60, progress=False)
        assert time.monotonic() - start < 20
    texts = [x for _, x in told(tmp_path / "run")]
    assert any("checkpoints behind" in x for x in texts) and "did not reach the mirror" in texts[-1]


@needs_s3
def test_s3_mistakes_are_told_before_training(s3, tmp_path):
    server, url = s3
    with pytest.raises(UserError, match="cannot be used: .*bucket.*mend that"): trainer(tmp_path / "run", "s3://no-such-bucket/run")
    server.proxy.mode = "403"
    with pytest.raises(UserError, match="cannot be used: .*mend that"): trainer(tmp_path / "run", url)
    assert not (tmp_path / "run").exists()


@needs_s3
def test_s3_server_that_lost_everything(s3, tmp_path):
    "A server is killed and comes back empty: without its bucket that is told, with it everything is sent again."
    server, url = s3
    with trainer(tmp_path / "run", url) as t:
        t.fit(until=10, progress=False)
        until(lambda: t.mirror.done == t.mirror.written, 60)
        server.kill()
        server.start()
        t.fit(until=20, progress=False)
        until(lambda: t.mirror.teller.since is not None, 60)
        server.bucket(url.split("/")[2])
    texts = told(tmp_path / "run")
    assert any("bucket" in x and level == "error" for level, x in texts) and "is up to date again" in texts[-1][1], texts
    assert Run(fetch(url, tmp_path / "new", lambda _: None)).checkpoints()[-1]["step"] == 20


@needs_s3
def test_s3_damage_is_found(s3, tmp_path):
    _, url = s3
    with trainer(tmp_path / "run", url) as t:
        t.fit(until=10, progress=False)
        until(lambda: t.mirror.done == t.mirror.written, 60)
        t.fit(until=20, progress=False)
    place = place_at(url)
    newest = read_manifest(place, manifests(place)[0])
    raw = bytearray(b"".join(place.read(f"objects/{newest.newest}")))
    raw[-1] ^= 1
    place.write(f"objects/{newest.newest}", [bytes(raw)], len(raw))
    lines = []
    run = Run(fetch(url, tmp_path / "new", lines.append))
    assert run.checkpoints()[-1]["step"] < 20 and any("is refused: checkpoints/step_00000020.pt has the SHA-256" in x for x in lines)


@needs_s3
def test_s3_keeps_no_half_of_an_upload(s3, tmp_path):
    _, url = s3
    place, bucket = place_at(url), url.split("/")[2]
    for key in ("run/objects/abc", "another/abc"): place.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    large(tmp_path / "run", 0.001)
    Sender(place, tmp_path / "run").push()
    assert [u["Key"] for u in place.fs.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]] == ["another/abc"], "others' stay"


@needs_s3
def test_s3_kills(s3, tmp_path):
    _, url = s3
    came = kill_and_resume(tmp_path, url, max(3, KILLS // 3), dict(os.environ))
    last = finish(tmp_path / "again", url, came[-1] + 15)
    assert last == finish(tmp_path / "whole", tmp_path / "m2", came[-1] + 15)


# ------------------------------------------------------------------------------------------------------------- in pieces

def large(path, gigabytes):
    "A run with a checkpoint of pseudo-random bytes, written in pieces."
    writer = RunWriter.claim(path, new=True)
    writer.set_meta(created=time.time(), folder=str(path)).result()
    file, digest, draw = CheckpointManager(path, writer.store).folder / "step_00000001.pt", hashlib.sha256(), torch.Generator().manual_seed(0)
    n = max(1, int(gigabytes * 2**30 / 2**23))
    with open(file, "wb") as f:
        for _ in range(n):
            f.write(piece := torch.randint(0, 256, (2**23,), dtype=torch.uint8, generator=draw).numpy().tobytes())
            digest.update(piece)
    writer.store.write("INSERT INTO checkpoints(time, step, file, sha256, bytes, state) VALUES(?,1,?,?,?,'kept')", time.time(), file.name, digest.hexdigest(), n * 2**23).result()
    writer.close()
    return digest.hexdigest()


@pytest.mark.parametrize("where", ["folder", pytest.param("s3", marks=needs_s3)])
@pytest.mark.timeout(7200)
def test_memory_is_bounded(tmp_path, where, request):
    url = tmp_path / "m" if where == "folder" else request.getfixturevalue("s3")[1]
    sha = large(tmp_path / "run", GB if where == "folder" else min(GB, 1.0))
    process, seen, stop = psutil.Process(), [], threading.Event()
    def watch():
        while not stop.wait(0.02): seen.append(process.memory_info().rss)
    place, before = place_at(url), process.memory_info().rss
    (thread := threading.Thread(target=watch)).start()
    start = time.monotonic()
    state = Sender(place, tmp_path / "run").push()
    sent = time.monotonic() - start
    fetched = fetch(place, tmp_path / "new", lambda _: None)
    stop.set(); thread.join()
    grown = (max(seen) - before) / 2**20
    print(f"{where}: {state.bytes / 1e9:.2f} GB sent in {sent:.1f} s, fetched in {time.monotonic() - start - sent:.1f} s, {grown:.0f} MiB more memory")
    assert Run(fetched).checkpoints()[0]["sha256"] == sha and grown < 200
