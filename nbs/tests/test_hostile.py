"""Damaged and hostile files: each costs its case, with a sentence, and never the command. `hostile/fuzz.py` has more."""
import os
import sys
from pathlib import Path

import pytest

HOSTILE = Path(__file__).parent / "hostile"
sys.path.insert(0, str(HOSTILE))
import fuzz  # noqa: E402
from generator import make  # noqa: E402

FILES = int(os.environ.get("MEDLAB_FUZZ", 400))  # 10,000 on request


@pytest.mark.skipif(sys.platform != "linux", reason="the reading process watches itself through /proc")
def test_no_file_does_more_than_cost_its_case():
    "Of files by seed: no traceback, crash, hang, gigabyte; no sound one lost, none taken that must be refused."
    results = fuzz.fuzz(FILES)
    bad = [r for r in results if r.outcome not in fuzz.GOOD]
    lines = [f"seed {r.seed}: {r.made.format} {r.made.kind}, must {r.made.must}: {r.outcome}; {r.said[-300:]}" for r in bad[:20]]
    assert not bad, "\n".join([*fuzz.counts(results, lambda r: r.made.format), *lines])
    formats, read, sound = ({r.made.format for r in results if test(r)} for test in (lambda r: True, lambda r: r.outcome == "read", lambda r: r.made.must == "read"))
    assert len(formats) > 10 and sound <= read and {"nifti", "nifti.gz", "dicom", "dicom series"} <= sound


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
