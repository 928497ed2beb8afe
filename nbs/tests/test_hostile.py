"""Damaged and hostile files: each costs its case, with a sentence, and never the command. `hostile/fuzz.py` has more."""
import errno
import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from medlab.core import UserError
from medlab.oct.files import find_oct
from medlab.slices.files import find_slices

HOSTILE = Path(__file__).parent / "hostile"
sys.path.insert(0, str(HOSTILE))
import fuzz  # noqa: E402
from generator import SHAPE, dicom, dicom_bytes, make  # noqa: E402

FILES = int(os.environ.get("MEDLAB_FUZZ", 400))  # 10,000 on request
FOUND = {478: "path: up", 533: "run: recipe", 789: "run: recipe", 1131: "path: long", 2019: "run: recipe", 3574: "tiff volume: cut, LZW",
    6193: "tiff: flip", 6308: "dicom: tags", 7621: "dicom: block", 7818: "run: recipe", 8044: "dicom: tags", 8670: "run: recipe"}  # seeds that once ended badly


@pytest.mark.skipif(sys.platform != "linux", reason="the reading process watches itself through /proc")
def test_no_file_does_more_than_cost_its_case():
    "Of files by seed: no traceback, crash, hang, gigabyte; no sound one lost, none taken that must be refused."
    results = fuzz.fuzz(FILES)
    bad = [r for r in results if r.outcome not in fuzz.GOOD]
    lines = [f"seed {r.seed}: {r.made.format} {r.made.kind}, must {r.made.must}: {r.outcome}; {r.said[-300:]}" for r in bad[:20]]
    assert not bad, "\n".join([*fuzz.counts(results, lambda r: r.made.format), *lines])
    formats, read, sound = ({r.made.format for r in results if test(r)} for test in (lambda r: True, lambda r: r.outcome == "read", lambda r: r.made.must == "read"))
    assert len(formats) > 10 and sound <= read and {"nifti", "nifti.gz", "dicom", "dicom series"} <= sound


@pytest.mark.skipif(sys.platform != "linux", reason="the reading process watches itself through /proc")
def test_what_once_ended_badly_is_refused():
    "Each once was a traceback or a hang."
    results = fuzz.try_all(FOUND)
    assert {r.seed: f"{r.made.format}: {r.made.kind}" for r in results} == FOUND, "the generator has changed: these seeds make other files"
    assert {r.outcome for r in results} <= {*fuzz.GOOD}, results


class BadSector(io.RawIOBase):
    "A file that opens and cannot be read."

    def __init__(self, file): self.file = file
    def readable(self): return True
    def fileno(self): return self.file.fileno()
    def readinto(self, buffer): raise OSError(errno.EIO, "Input/output error")


def test_a_file_on_a_bad_sector_costs_its_case(tmp_path, monkeypatch):
    "A disk that fails within one series: the others are found, and the file is named."
    data, opened = np.random.default_rng(0).integers(-1000, 1000, SHAPE).astype(np.int16), open
    for who in ("P1", "P2"):
        (tmp_path / who).mkdir()
        for z in range(SHAPE[0]): (tmp_path / who / f"{z}.dcm").write_bytes(dicom_bytes(dicom(data, z)))
    assert not any(c.fault for find in (find_slices, find_oct) for c in find(tmp_path))
    bad = str(tmp_path / "P2/2.dcm")
    monkeypatch.setattr("builtins.open", lambda p, *a, **k: BadSector(opened(p, *a, **k)) if str(p) == bad else opened(p, *a, **k))
    by = {c.name: c for c in find_slices(tmp_path)}
    assert by["P1"].read()["thin"].data.shape == SHAPE
    with pytest.raises(UserError, match=f"{bad}: cannot be read .input/output error."): by["P2"].read()
    assert [c.fault[:len(bad)] for c in find_oct(tmp_path) if c.fault] == [bad] and len(find_oct(tmp_path)) == 3


def test_the_same_seed_makes_the_same_file(tmp_path):
    "A crash can be made again by its seed."
    for i, seed in enumerate((1, 5, 9, 23, 47)):
        made = []
        for again in "ab":
            folder = tmp_path / f"{i}{again}"
            folder.mkdir()
            m = make(seed, folder)
            made.append((m.format, m.kind, m.must, m.path.read_bytes() if os.path.isfile(m.path) else sorted(os.listdir(os.path.dirname(m.path)))))
        assert made[0] == made[1], seed


@pytest.mark.skipif(sys.platform != "linux", reason="the reading process watches itself through /proc")
@pytest.mark.parametrize("what, outcome", [("raise KeyError('x')", "traceback"), ("os._exit(9)", "crash"), ("time.sleep(99)", "hang"),
    ("x = bytes([1]) * (11 << 27)", "memory"), ("raise UserError('\\x1b'[0:])", "refused"), ("return False", "misread"), ("return None", "taken")])
def test_the_watch_sees_what_it_is_to_see(what, outcome, tmp_path, monkeypatch):
    "Planted: a reader that fails in each way is told as that."
    program = (HOSTILE / "reading.py").read_text().replace("def nifti(path):", f"def nifti(path):\n    from medlab.core import UserError\n    {what}", 1)
    (tmp_path / "reading.py").write_text(program)
    monkeypatch.setattr(fuzz, "HERE", tmp_path)
    reader = fuzz.Reader()
    try:
        reader.read(fuzz.Made("csv", "none", tmp_path / "none.csv"))  # imports take their time
        made = fuzz.Made("nifti", "planted", tmp_path / "a.nii", "refuse")
        assert fuzz.judged(0, made, reader.read(made, 3 if outcome == "hang" else 30)).outcome == outcome
    finally: reader.stop()
