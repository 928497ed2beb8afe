"""Makes thousands of tiny cases, some of them damaged in ways of their own, deterministic by seed; and measures a command."""
import gzip
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import psutil

from medlab.data.cases import BRATS

OLD = 1_600_000_000  # s, when the files were changed last: long ago, so that they are remembered
EVERY = 50  # of so many cases one is damaged


def _write(path, data, spacing):
    "A packed volume, quickly."
    raw = nib.Nifti1Image(data, np.diag([*spacing, 1.0])).to_bytes()
    path.write_bytes(gzip.compress(raw, 1))


def _truncate(path): path.write_bytes(path.read_bytes()[:-40])


def _noise(path): path.write_bytes(np.random.default_rng(0).bytes(500))


def _nan(path):
    "One voxel that is not finite."
    data = np.full((12, 12, 12), 5.0, np.float32)
    data[1, 2, 3] = np.nan
    _write(path, data, (1, 1, 1))


DAMAGE = dict(truncated=_truncate, empty=lambda p: p.write_bytes(b""), noise=_noise, nan=_nan, flat=lambda p: _write(p, np.full((12, 12, 12), 3, np.int16), (1, 1, 1)))


def make_cases(root, n, seed=0, size=12):
    "Write `n` cases of four modalities; the names of the damaged ones."
    rng, bad, damage = np.random.default_rng(seed), [], [*DAMAGE.items()]
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, size)] * 3, indexing="ij"))
    head = (np.square(grid).sum(0) < 0.7).astype(np.float32)
    for i in range(n):
        kind, spoil = damage[i // EVERY % len(damage)]
        broken = i % EVERY == EVERY // 2
        name = f"P{i:05}" + f"-{kind}" * broken
        folder = root / name
        folder.mkdir(parents=True)
        own = rng.normal(size=(size // 3,) * 3).repeat(3, 0).repeat(3, 1).repeat(3, 2)  # nobody's head is another's copy
        spacing = (5.0, 1.0, 1.0) if i % 997 == 500 else (1.0, 1.0, 1.0)
        for k, m in enumerate(BRATS):
            data = (head * (300 + 100 * k + 40 * own * (1, -1)[k % 2] + 5 * rng.normal(size=head.shape))).astype(np.int16)
            _write(folder / f"{name}-{m}.nii.gz", data, spacing[::-1])
        if broken:
            bad.append(name)
            spoil(folder / f"{name}-t1n.nii.gz")
    for p in root.rglob("*.gz"): os.utime(p, (OLD, OLD))
    return bad


def labelled(root, n=10, **special):
    "Cases with one organ; of some the mask is changed, the image as it was."
    (root / "images").mkdir(parents=True); (root / "labels").mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        image, mask = np.zeros((20, 20, 20), np.float32), np.zeros((20, 20, 20), np.uint8)
        image[4:16, 4:16, 4:16] = 100 + rng.normal(size=(12, 12, 12))
        mask[8:12, 8:12, 8:11], mask[5:7, 5:7, 5:7] = 1, 2
        if change := special.get(f"c{i}"): change(mask)
        for folder, data in (("images", image), ("labels", mask)):
            nib.save(nib.Nifti1Image(data, np.diag([1, 1, 2, 1])), root / folder / f"c{i}.nii.gz")
    return root


def _pss(process):
    "Memory of a process and all below it, shared pages counted once, bytes."
    total = 0
    for p in [process, *process.children(recursive=True)]:
        try: total += p.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError): pass
    return total


def measured(*argv, env=None, pause=0.25):
    "(status, standard output, standard error, seconds, peak memory of the tree in MiB) of a command of medlab."
    start, peak = time.perf_counter(), 0
    path = str(Path(__file__).parents[2])
    whole = {**os.environ, "PYTHONPATH": path, **(env or {})}
    done = subprocess.Popen([sys.executable, "-m", "medlab", *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=whole)
    said = []
    reader = threading.Thread(target=lambda: said.extend(done.communicate()))
    reader.start()
    tree = psutil.Process(done.pid)
    while done.poll() is None:
        try: peak = max(peak, _pss(tree))
        except psutil.NoSuchProcess: break
        time.sleep(pause)
    reader.join()
    return done.returncode, *said, time.perf_counter() - start, peak / 2**20
