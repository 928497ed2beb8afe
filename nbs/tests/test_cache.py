"""Decoded volumes on disk: the same bits with and without them, whatever happens to the files, the disk and the processes."""
import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
import warnings

import nibabel as nib
import numpy as np
import pytest
import torch

from medlab import Trainer, recipes
from medlab.cache import folder as folder_module
from medlab.cache import kept
from medlab.cache.bricks import Stored, open_bricks
from medlab.cache.folder import named_folder
from medlab.cli.main import main
from medlab.data.label_files import LabelledPhantom, find_labelled
from medlab.data.labels import LabelTable
from medlab.data.patches import Augment, PatchDataset
from medlab.data.volume import Volume, write_volume
from medlab.oct.phantoms import write_oct_phantoms
from medlab.phantoms import write_brats


@pytest.fixture(autouse=True)
def off(monkeypatch):
    "No folder, and no other's counts."
    for name in ("MEDLAB_CACHE", "MEDLAB_CACHE_GB"): monkeypatch.delenv(name, raising=False)
    folder_module._known.clear()


@pytest.fixture
def on(monkeypatch, tmp_path):
    "Switches to a folder of the test, with new counts; the size in GB."
    def turn(name="cache", gb=""):
        monkeypatch.setenv("MEDLAB_CACHE", str(tmp_path / name))
        monkeypatch.setenv("MEDLAB_CACHE_GB", str(gb))
        folder_module._known.clear()
        return named_folder()
    return turn


@pytest.fixture
def root(tmp_path):
    "Three heads with labels, in folders."
    for seed in range(3):
        case = LabelledPhantom(seed, (40, 48, 36))
        parts, name = case.read(), f"P{seed}.nii.gz"
        write_volume(parts["images"][0], tmp_path / "data/images" / name)
        write_volume(parts["label"], tmp_path / "data/labels" / name, np.uint8)
    return tmp_path / "data"


def dataset(root, memory=1, **kw):
    "Patches of the heads, cut on disk where there is a folder, for the memory is too small."
    kw = dict(max_distance=5.0, augment=Augment(), map_bytes=memory) | kw
    return PatchDataset(find_labelled(root).cases, LabelTable((0, 1, 2, 3, 4)), (16, 20, 18), cache_bytes=memory, **kw)


def items(ds, n=12): return digest([ds[i % len(ds), i] for i in range(n)])


def digest(thing):
    "A hash of all bits."
    if torch.is_tensor(thing): return hashlib.sha256(str((thing.dtype, thing.shape)).encode() + thing.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(thing, dict): thing = sorted((k, digest(v)) for k, v in thing.items())
    elif isinstance(thing, (list, tuple)): thing = [digest(v) for v in thing]
    return hashlib.sha256(str(thing).encode()).hexdigest()


@pytest.mark.parametrize("kw", [dict(), dict(augment=Augment(rotate=20.0, zoom=0.1)), dict(max_distance=None, augment=None)], ids=["cut", "turned", "plain"])
def test_patches_have_the_same_bits(root, on, kw):
    truth = items(dataset(root, 1 << 30, **kw))
    cache = on()
    assert items(dataset(root, **kw)) == truth and cache.counts["written"] >= 3
    folder_module._known.clear()
    assert items(dataset(root, **kw)) == items(dataset(root, 0, **kw)) == items(dataset(root, 1 << 30, **kw)) == truth
    assert named_folder().counts["found"] >= 3 and not named_folder().counts["written"]


def test_what_does_not_fit_into_memory_is_cut_on_disk_and_what_does_is_not(root, on):
    on()
    small, large = dataset(root), dataset(root, 1 << 30)
    assert isinstance(small._kept(0).image, Stored) and isinstance(small._kept(0).label, Stored)
    assert torch.is_tensor(large._kept(0).image) and large.volumes.stats["kept"] == 1
    middle = dataset(root, 3 * 40 * 48 * 36 * 5)  # room for two of three, and what is cut beside them
    items(middle)
    held = middle.volumes
    assert held.bytes <= held.limit and held.stats["kept"] == 3


RECIPES = dict(
    fast_ddpm=lambda root: recipes.FastDDPM(data_root=str(root / "brats"), **recipes.FastDDPM.tiny | dict(image_size=(8, 8, 8), mode="patch", val=0.2, test=0.0, cache_gb=0.0)),
    resized=lambda root: recipes.FastDDPM(data_root=str(root / "brats"), **recipes.FastDDPM.tiny | dict(image_size=(8, 8, 8), val=0.2, test=0.0, cache_gb=0.0)),
    restoration=lambda root: recipes.Restoration(data_root=str(root / "data/images"), **recipes.Restoration.tiny | dict(spatial_dims=3, image_size=(16, 16, 16), val=0.0, test=0.0, cache_gb=0.0)),
    segmentation=lambda root: recipes.Segmentation(data_root=str(root / "data"), **recipes.Segmentation.tiny | dict(val=0.0, test=0.0, cache_gb=0.0)),
    vjepa3d=lambda root: recipes.VJEPA3D(data_root=str(root / "oct"), **recipes.VJEPA3D.tiny | dict(cache_gb=0.0)))


def trained(recipe, path, **fields):
    "The hash of the weights after some steps."
    for k, v in fields.items(): setattr(recipe, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Trainer(recipe, path, device="cpu") as t:
            t.fit(steps=3)
            assert not t.run.events("bad_sample") and t.run.state == "done"
            return digest(dict(t.model.state_dict()))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_to_the_same_bits(name, root, on, tmp_path):
    "Without, with an empty folder, and with a full one."
    if "brats" in str(RECIPES[name].__code__.co_consts): write_brats(tmp_path / "brats", range(5), size=(20, 20, 20))
    if name == "vjepa3d": write_oct_phantoms(tmp_path / "oct", 6, shape=(8, 32, 32))
    new = lambda: RECIPES[name](tmp_path)
    truth = trained(new(), tmp_path / "a")
    cache = on()
    assert trained(new(), tmp_path / "b") == truth and cache.counts["written"]
    cache = on()
    assert trained(new(), tmp_path / "c") == truth and cache.counts["found"] and not cache.counts["written"] and not cache.counts["damaged"]


def test_two_loading_processes_share_what_each_has_decoded(root, on, tmp_path):
    new = lambda: RECIPES["segmentation"](tmp_path)
    truth = trained(new(), tmp_path / "a", workers=2)  # begins the server of processes, which knows of no cache
    cache = on()
    assert trained(new(), tmp_path / "b", workers=2) == truth
    assert len(cache.entries()) == 6 and not any(e.part for e in cache.entries())  # a volume and its maps for each head


RANKS = 2


def as_rank(rank, root, sizes, start, results):
    "What one of several ranks of a machine does in two epochs over all cases, all of them at once; a process of its own."
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    recipe, done, whole, hashed = RECIPES["segmentation"](root), dict(decoded=0, hashed=0), PatchDataset.whole, kept.content_hash
    recipe.workers, recipe.cache_gb = 2, 0.5

    def counted(name, function):
        def call(*args, **kw):
            done[name] += 1
            time.sleep(0.2)  # the other one comes meanwhile
            return function(*args, **kw)
        return call

    PatchDataset.whole, kept.content_hash = counted("decoded", whole), counted("hashed", hashed)
    for place, gb in sizes:
        os.environ |= dict(MEDLAB_CACHE=str(place), MEDLAB_CACHE_GB=gb)
        done |= dict(decoded=0, hashed=0)
        cases, cache, most, made = dataset(root / "data"), named_folder(), 0, {}
        start.wait(120)
        for i in range(2 * len(cases)):
            made[i % len(cases)] = digest(cases[i % len(cases), 7])
            with folder_module._locked(cache.folder, "room", 30): there = cache.entries()  # nobody makes room meanwhile
            most = max(most, sum({e.path.name.strip(".")[:32]: e.size for e in there}.values()))
        results.put((gb, dict(done, made=made, most=most, granted=recipe.cache_bytes(), counts=dict(cache.counts), trouble=cache.trouble)))


@pytest.mark.timeout(300)  # on a busy machine the ranks take a while to start
def test_ranks_of_a_machine_share_one_cache(root, tmp_path):
    """Each case is hashed, decoded and written once, whoever comes first; the limits, of the folder and of `cache_gb`, are
    those of all ranks together."""
    truth = {i: digest(dataset(root, 1 << 30)[i, 7]) for i in range(3)}
    time.sleep(2.1)  # so that the files are known by their times
    context, sizes = multiprocessing.get_context("spawn"), [(tmp_path / "wide", ""), (tmp_path / "small", "7e-4")]
    start, results = context.Barrier(RANKS), context.Queue()
    processes = [context.Process(target=as_rank, args=(r, tmp_path, sizes, start, results)) for r in range(RANKS)]
    for p in processes: p.start()
    found = [results.get(timeout=200) for _ in range(2 * RANKS)]
    for p in processes: p.join(60)
    assert [p.exitcode for p in processes] == [0] * RANKS and all(f["made"] == truth and not f["trouble"] for _, f in found)
    wide, small = [f for gb, f in found if not gb], [f for gb, f in found if gb]
    total = {k: sum(f[k] for f in wide) for k in ("decoded", "hashed")} | {k: sum(f["counts"].get(k, 0) for f in wide) for k in ("written", "damaged", "no room")}
    assert total == dict(decoded=3, hashed=3, written=6, damaged=0, **{"no room": 0}), total
    granted = sum(2 * f["granted"] for f in wide)  # two loading processes of each
    assert 0 <= 0.5 * 2**30 - granted < 100
    assert 0 < max(f["most"] for f in small) <= 7e5 and sum(f["counts"].get("no room", 0) for f in small)


def rewritten(path, add):
    "Other values in a file, of the same size and the same time."
    before, image = path.stat(), nib.load(path)
    data = np.asarray(image.dataobj)
    nib.save(nib.Nifti1Image((data + add).astype(data.dtype), image.affine, image.header), path)
    with open(path, "ab") as f: f.write(bytes(max(0, before.st_size - path.stat().st_size)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_changed_file_is_never_served_as_it_was(root, on):
    for p in root.rglob("*.nii.gz"): p.write_bytes(p.read_bytes() + bytes(1000))  # room for a larger one of the same size
    cache, path = on(), root / "images/P1.nii.gz"
    time.sleep(2.1)  # so that the files are known by their times
    first = items(dataset(root))
    assert items(dataset(root)) == first and len(cache.names()) == 3
    size = path.stat().st_size
    rewritten(path, 0.5)
    assert path.stat().st_size == size
    changed = items(dataset(root))
    assert changed != first
    folder_module._known.clear()
    os.environ.pop("MEDLAB_CACHE")
    assert items(dataset(root)) == changed


def test_known_by_its_times_a_case_is_not_read_again(root, on, monkeypatch):
    cache = on()
    time.sleep(2.1)
    items(dataset(root))
    monkeypatch.setattr(kept, "content_hash", lambda files: pytest.fail("hashed again"))
    monkeypatch.setattr(PatchDataset, "whole", lambda *args, **kw: pytest.fail("decoded again"))
    items(dataset(root))
    assert cache.counts["written"] == 6


def test_the_same_files_at_two_places_are_stored_once_and_keep_their_names(root, on, tmp_path):
    cache = on()
    items(dataset(root))
    n = len(cache.entries())
    shutil.copytree(root, tmp_path / "again")
    for p in (tmp_path / "again").rglob("P0.nii.gz"): p.rename(p.with_name("other.nii.gz"))
    ds = dataset(tmp_path / "again")
    assert {ds[i, 0]["case"] for i in range(3)} == {"other", "P1", "P2"} and ds._kept(2).like.name == "other"
    assert len(cache.entries()) == n and not any("P0" in str(open_bricks(e.path, e.path.stem)) for e in cache.entries())


def test_other_settings_and_other_code_are_other_volumes(root, on, monkeypatch):
    cache = on()
    items(dataset(root))
    for kw in (dict(max_distance=4.0), dict(intensity=type(dataset(root).intensity)("window", 0.0, 2.0))):
        n = len(cache.entries())
        items(dataset(root, **kw))
        assert len(cache.entries()) > n
    n = len(cache.entries())
    monkeypatch.setattr(kept, "code_hash", lambda: "another")
    items(dataset(root))
    assert len(cache.entries()) == n + 6


DAMAGES = dict(cut=lambda raw, rng: raw[:rng.randrange(len(raw))], empty=lambda raw, rng: b"", zeros=lambda raw, rng: raw[:(k := rng.randrange(len(raw)))] + bytes(len(raw) - k),
    bit=lambda raw, rng: raw[:(k := rng.randrange(len(raw)))] + bytes([raw[k] ^ 1 << rng.randrange(8)]) + raw[k + 1:], longer=lambda raw, rng: raw + b"x", swapped=None)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_volume_is_found_and_made_again(root, on, how):
    "Before a run opens it, and while it has it open."
    truth, cache, rng = items(dataset(root, 1 << 30)), on(), random.Random(how)
    assert items(dataset(root)) == truth
    for k in range(4):
        ds = dataset(root)
        if k % 2: items(ds, 3)  # it is open
        paths = [e.path for e in cache.entries()]
        assert len(paths) == 6
        if how == "swapped":
            raws = [p.read_bytes() for p in paths]
            for p, raw in zip(paths, raws[1:] + raws[:1]): p.write_bytes(raw)
        else:
            for p in paths: p.write_bytes(DAMAGES[how](p.read_bytes(), rng))
        assert items(ds, 40) == items(dataset(root, 1 << 30), 40)
    assert cache.counts["damaged"] >= 6 and not cache.trouble


FORKED = """
import json, os, random, signal, sys, time, warnings
import numpy as np
from medlab.cache.bricks import Damaged
from medlab.cache.folder import CacheFolder, _locked
place, limit, children, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
keys = [f"{i:02x}" * 16 for i in range(12)]
made = {k: dict(image=np.random.default_rng(k).integers(0, 500, (40, 64, 64)).astype(np.float32), noise=np.random.default_rng(k).standard_normal((64, 64, 64))) for k in range(12)}
begun, say = os.pipe()

def write():
    cache, rng = CacheFolder(place, limit, keep=0), random.Random(os.getpid())
    while True:
        os.write(say, b".")
        k = rng.randrange(12)
        with cache.lock_of(keys[k]):
            if not cache.find(keys[k]): cache.put(keys[k], made[k], dict(k=k))

def started():
    pid = os.fork()
    if pid: return pid
    try: write()
    finally: os._exit(1)

cache, rng, seen, most, partial = CacheFolder(place, limit, keep=0), random.Random(0), 0, 0, 0
for n in range(kills):
    pids = [started() for _ in range(children)]
    for _ in range(6): os.read(begun, 1)
    until = time.monotonic() + (2 if n % 2 else rng.uniform(0, 0.05))
    while time.monotonic() < until:
        with _locked(cache.folder, "room", 30): there = cache.entries()  # nobody makes room meanwhile
        most = max(most, sum({e.path.name.strip(".")[:32]: e.size for e in there}.values()))  # a renamed file is seen twice
        if n % 2 and any(e.part for e in there): break  # in the middle of a file
    for p in pids: os.kill(p, signal.SIGKILL)
    for p in pids: assert os.waitpid(p, 0)[1] == signal.SIGKILL
    partial += sum(e.part for e in cache.entries())
    for k, key in enumerate(keys):  # all that is there is whole
        if found := cache.find(key):
            seen += 1
            assert found.facts == dict(k=k) and all(found.read(name).tobytes() == x.tobytes() for name, x in made[k].items())
assert cache.make_room(0) and not any(e.part for e in cache.entries())
print(json.dumps(dict(seen=seen, most=most, partial=partial, damaged=cache.counts["damaged"])))
"""


@pytest.mark.parametrize("children", [1, 2])
def test_killed_writers_leave_nothing_that_is_served_or_stays(tmp_path, children):
    "kill −9 twenty times, at any moment; with two writers the sum of all files is looked at all the while."
    limit = 5 * 2_500_000
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "c"), str(limit), str(children), "20"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["seen"] > 20 and found["damaged"] == 0 and 0 < found["most"] <= limit and found["partial"] > 0, found


def test_a_full_disk_is_said_once_and_the_run_goes_on(root, on, monkeypatch):
    truth = items(dataset(root, 1 << 30))

    def full(*args): raise OSError(errno.ENOSPC, "No space left on device")
    for target in ("os.posix_fallocate", "medlab.cache.bricks.Plan.write", "os.replace"):
        with monkeypatch.context() as m:
            cache = on(target)
            m.setattr(target, full)
            with pytest.warns(UserWarning, match="no space left on device; the run goes on without") as said: assert items(dataset(root)) == truth
            assert len(said) == 1 and not cache.entries()
    cache = on("file")
    cache.folder.write_text("not a folder")
    with pytest.warns(UserWarning, match="goes on without"): assert items(dataset(root)) == truth


def test_a_volume_that_another_process_holds_for_ever_is_made_without_it(root, on):
    truth = items(dataset(root, 1 << 30))
    cache = on()
    cache.patience = 0.05
    with cache.lock_of("00"):
        held = [folder_module._locked(cache.folder, f"{i:02x}", 1) for i in range(1, 256)]
        for lock in held: lock.__enter__()
        assert items(dataset(root)) == truth and not cache.entries() and not cache.trouble
        for lock in held: lock.__exit__(None, None, None)


def test_a_faulty_case_is_told_by_its_reader_and_not_kept(root, on):
    cache = on()
    (root / "images/P0.nii.gz").write_bytes(b"\x1f\x8b" + bytes(30))
    ds = dataset(root)
    for _ in range(2):
        with pytest.raises(ValueError, match="P0.*damaged"): ds[0, 0]
    assert not cache.entries()
    write_volume(Volume(np.full((40, 48, 36), 3, np.float32), np.eye(4)), root / "images/P0.nii.gz")
    with pytest.raises(ValueError, match="grids differ|is constant"): dataset(root)[0, 0]
    assert not cache.entries()


@pytest.mark.parametrize("gb", ["abc", "0", "-1", "nan", "inf", "1e10"])
def test_a_size_that_is_none_is_refused_before_any_sample(root, tmp_path, on, gb, capsys, monkeypatch):
    cache = on(gb="")
    command = ["train", "segmentation", "--data_root", str(root), "--run", str(tmp_path / "run"), "--steps", "1", "--debug"]
    monkeypatch.setenv("MEDLAB_CACHE_GB", gb)
    assert main(command) == 2 and not (tmp_path / "run").exists()
    assert f"MEDLAB_CACHE_GB={gb!r} must be a number of GB above 0" in capsys.readouterr().err
    assert not cache.entries()
    monkeypatch.setenv("MEDLAB_CACHE_GB", "0.5")
    assert main(command) == 0 and named_folder().limit == 5e8


def test_the_command_lists_and_clears(root, on, capsys, monkeypatch):
    def said(*words):
        status = main(["cache", *words])
        out = capsys.readouterr()
        return status, out.out, out.err

    assert said() == (0, "no decoded volumes are kept: MEDLAB_CACHE names no folder; export MEDLAB_CACHE=/fast/disk/medlab-volumes turns it on for all runs\n", "")
    cache = on(gb=1)
    assert said()[1].startswith(f"decoded volumes in {cache.folder}: 0, 0 of at most 1 GB (MEDLAB_CACHE_GB=1)\n")
    items(dataset(root))
    status, text, _ = said()
    assert status == 0 and text.count("LoadedLabels: image 1×40×48×36, label 40×48×36") == 3 and text.count("ClassMaps: maps 4×40×48×36") == 3 and ": 6, 0.00" in text and "last used 0 seconds ago" in text
    cache.entries()[0].path.write_bytes(b"garbage")
    assert "damaged: " in said()[1]
    assert said("--clear")[1].startswith(f"decoded volumes in {cache.folder}: removed 6, 0.00") and not cache.entries()
    status, _, error = said("--claer")
    assert status == 2 and "did you mean '--clear'" in error
    monkeypatch.setenv("MEDLAB_CACHE_GB", "many")
    assert said()[0] == 2
    with pytest.raises(SystemExit): said("--help")
    assert "MEDLAB_CACHE_GB is its size" in " ".join(capsys.readouterr().out.split())
