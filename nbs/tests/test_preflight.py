"""`medlab check` over many cases: what it finds, how long it takes, what it remembers, and the page that it writes.

MEDLAB_MANY=5000 takes so many cases; MEDLAB_NOTE=FILE appends what was measured."""
import csv
import os
import re
import sqlite3
from pathlib import Path

import pytest

from many_cases import DAMAGE, OLD, labelled, make_cases, measured
from medlab.data.cases import find_cases, inspect_cases, inspect_each
from medlab.data.label_files import find_labelled
from medlab.data.labelled import inspect_all
from medlab.phantoms import write_brats
from medlab.preflight import each
from medlab.preflight.faults import dicom_table
from medlab.preflight.remembered import reread
from medlab.preflight.report import Report
from medlab.recipes import FastDDPM
from medlab.slices.files import find_slices
from medlab.slices.pairs import inspect_slices
from test_cli import said

MANY = int(os.environ.get("MEDLAB_MANY", "200"))
DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).parents[3] / "shared/data"))
OPTIONS = ("--debug", "--limit", "0", "--threads", "1", "--precision", "fp32")


def note(text):
    "Print what was measured, and append it to a file where one is named."
    print(text)
    if file := os.environ.get("MEDLAB_NOTE"):
        with open(file, "a") as f: f.write(text + "\n")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    root = tmp_path_factory.mktemp("many")
    return root / "cases", make_cases(root / "cases", MANY), root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDLAB_CACHE", str(tmp_path / "cache"))


def test_many_cases_twice_and_trained(many):
    "The first and the second check and a training: the same verdict, bounded memory, nothing read twice."
    root, bad, folder = many
    found, env = {}, dict(MEDLAB_CACHE=str(folder / "cache"), MEDLAB_READERS="2")
    for turn in ("first", "second"):
        files = folder / f"{turn}.csv", folder / f"{turn}.html"
        status, out, err, seconds, peak = measured("check", root, *OPTIONS, "--csv", files[0], "--html", files[1], env=env)
        assert status == 0 and f"{MANY} cases: {MANY - len(bad)} sound, {len(bad)} in quarantine" in out, (out[-2000:], err[-2000:])
        assert peak < 1024 and out.count("quarantine: ") <= 40
        if turn == "first" and MANY >= 5000: assert re.search(r"checking cases: [\d,]+ of [\d,]+ read, about .* left", err), err
        if turn == "second": assert "checking cases" not in err, "nothing is read"
        rows = list(csv.DictReader(files[0].open(newline="")))
        found[turn] = sorted((r["case"], r["reason"]) for r in rows if r["verdict"] == "quarantine")
        size = files[1].stat().st_size
        assert len(rows) == MANY and size < 30 * 2**20 * max(1, MANY / 5000)
        note(f"{turn} check of {MANY} cases: {seconds:.1f} s, at most {peak:.0f} MiB in all processes, page {size / 2**20:.1f} MiB")
    assert [n for n, _ in found["first"]] == sorted(bad) and found["first"] == found["second"]
    status, out, err, seconds, peak = measured("train", "fast_ddpm", "--data-root", root, *OPTIONS, "--run", folder / "run", "--steps", "1", env=env)
    left = sorted(re.findall(r"medlab: warning: (\S+) is left out: (.*)", err))
    assert status == 0 and left == found["first"], (left[:3], found["first"][:3], err[-1000:])
    note(f"training to step 1 on the same cases: {seconds:.1f} s, {peak:.0f} MiB")


def test_threads_and_processes_agree_and_know_of_one_another(many, monkeypatch):
    root, bad, _ = many
    cases = find_cases(root)[:100]
    told = {}
    for readers in ("0", "2"):
        monkeypatch.setenv(each.READERS, readers)
        with reread(): told[readers] = [(c.case.name, c.reason, c.facts) for c in inspect_cases(cases, at_least=2, required=())]
    assert told["0"] == told["2"] and sum(bool(r) for _, r, _ in told["0"]) == 2
    monkeypatch.setattr(each, "_read", lambda *a: pytest.fail("it was read again"))
    assert [(c.case.name, c.reason, c.facts) for c in inspect_cases(cases, at_least=2, required=())] == told["0"]
    recipe = FastDDPM(**(FastDDPM.tiny | dict(limit=100)), data_root=str(root))
    assert not recipe.preflight().ok, "asked as a recipe does"
    with pytest.raises(pytest.fail.Exception): inspect_cases(cases, at_least=3)


def test_a_changed_file_is_read_again_and_a_spoilt_store_is_no_fault(tmp_path, monkeypatch):
    bad = make_cases(tmp_path / "cases", 30)
    first = inspect_cases(find_cases(tmp_path / "cases"))
    assert [c.case.name for c in first if c.reason] == bad == ["P00025-truncated"]
    DAMAGE["nan"](tmp_path / "cases/P00003/P00003-t1n.nii.gz")
    again = inspect_cases(find_cases(tmp_path / "cases"))
    assert [c.case.name for c in again if c.reason] == ["P00003", "P00025-truncated"]
    store = tmp_path / "cache/inspections-1.db"
    assert len(sqlite3.connect(store).execute("SELECT key FROM found").fetchall()) == 30, "what is fresh is not kept"
    for raw in (b"", b"noise" * 3000, store.read_bytes()[:-3000]):
        store.write_bytes(raw)
        assert [c.case.name for c in inspect_cases(find_cases(tmp_path / "cases")) if c.reason] == ["P00003", "P00025-truncated"]
    monkeypatch.setenv("MEDLAB_CACHE", str(tmp_path / "cases/P00001/P00001-t1n.nii.gz"))
    assert [c.case.name for c in inspect_cases(find_cases(tmp_path / "cases")) if c.reason] == ["P00003", "P00025-truncated"]


def test_a_verdict_of_the_moment_is_not_kept(tmp_path, monkeypatch):
    "No permission, no memory: asked again the next time, when there may be."
    make_cases(tmp_path / "cases", 5)
    from medlab.data import cases as module
    for error in (MemoryError(), PermissionError(13, "Permission denied")):
        def failing(path, *a, **kw): raise module.UserError(f"{path}: cannot be read") from error
        with monkeypatch.context() as m:
            m.setattr(module, "read_volume", failing)
            assert all("cannot be read" in c.reason for c in inspect_cases(find_cases(tmp_path / "cases")))
        with monkeypatch.context() as m:
            m.setattr(each, "_read", lambda *a: iter(()))
            with pytest.raises(TypeError): inspect_cases(find_cases(tmp_path / "cases"))  # nobody knows
    assert not any(c.reason for c in inspect_cases(find_cases(tmp_path / "cases")))


def test_a_case_that_ends_its_process_is_named(tmp_path, monkeypatch):
    "The others go on; here by a function that another process finds."
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deadly_inspection.py").write_text("import os\nfrom medlab.data.cases import inspect_case\n"
        "def look(case):\n    if case.name == 'P00007': os.kill(os.getpid(), 11)\n    return inspect_case(case)\n")
    from deadly_inspection import look
    make_cases(tmp_path / "cases", 20)
    monkeypatch.setenv(each.READERS, "2")
    found = {c.case.name: c.reason for c in inspect_each(look, find_cases(tmp_path / "cases")) if c.reason}
    assert list(found) == ["P00007"] and "the process that read it died (SIGSEGV)" in found["P00007"]


@pytest.mark.parametrize("options,env,words", [
    ("--csv {0}/none/a.csv", {}, "does not exist; make it first"), ("--html {0}/none/a.html", {}, "--html {0}/none/a.html: the folder"),
    ("--csv {0}", {}, "is a folder; name a file in it"), ("--html {0}", {}, "such as {0}/cases.html"), ("--csv /dev/null/a", {}, "does not exist"),
    ("--csv", {}, "--csv"), ("--html", {}, "--html"), ("--reread 3", {}, ""), ("", dict(MEDLAB_READERS="many"), "MEDLAB_READERS='many' must be a number"),
    ("", dict(MEDLAB_READERS="-1"), "must be a number from 0"),
])
def test_mistakes(tmp_path, monkeypatch, options, env, words):
    write_brats(tmp_path / "cases", [1, 2, 3, 4], size=(16, 16, 16))
    for k, v in env.items(): monkeypatch.setenv(k, v)
    status, out, err = said("check", tmp_path / "cases", "--debug", *options.format(tmp_path).split())
    assert status == 2 and words.format(tmp_path) in err and err.count("\n") == 1, (status, err)
    assert not list(tmp_path.glob("*.csv"))


def test_reread(tmp_path):
    "A check reads again what it knows, where it is asked to; so does a training."
    make_cases(tmp_path / "cases", 6)
    options = ("--debug", "--threads", 1, "--precision", "fp32")
    assert said("check", tmp_path / "cases", *options)[0] == 0
    store = tmp_path / "cache/inspections-1.db"
    with sqlite3.connect(store) as db: before = db.execute("SELECT max(rowid) FROM found").fetchone()[0]
    assert before == 6
    for argv, rows in ((("check", tmp_path / "cases"), 6), (("check", tmp_path / "cases", "--reread"), 12), (("train", "fast_ddpm", "--data-root", tmp_path / "cases", "--reread", "--run", tmp_path / "run", "--steps", 1), 18)):
        status, out, err = said(*argv, *options)
        with sqlite3.connect(store) as db: now = db.execute("SELECT max(rowid), count(*) FROM found").fetchone()
        assert status == 0 and now == (rows, 6), (argv, now, err)
        assert argv[0] == "train" or "--reread" not in out.splitlines()[-1]


@pytest.mark.parametrize("recipe", ["fast_ddpm", "segmentation"])
def test_a_case_in_quarantine_is_named_once(tmp_path, recipe):
    "In the table and nowhere else; training, which shows no table, names it on stderr."
    if recipe == "segmentation": bad = labelled(tmp_path / "data") / "images/c3.nii.gz"
    else:
        make_cases(tmp_path / "data", 6)
        bad = next((tmp_path / "data/P00004").glob("*t1n*"))
    bad.write_bytes(b"")
    options = (tmp_path / "data", "--debug", "--threads", 1, "--precision", "fp32", *([] if recipe == "fast_ddpm" else ["--image-size", "16,16,16"]))
    name = "c3" if recipe == "segmentation" else "P00004"
    status, out, err = said("check", *options, "--recipe", recipe)
    assert status == 0 and (out + err).count("is empty (0 bytes)") == 1 == out.count(f"| {name} ") and name not in err, (out, err)
    status, out, err = said("train", recipe, "--data-root", *options, "--run", tmp_path / "run", "--steps", 1)
    assert status == 0 and err.count(f"{name} is left out") == 1 and "is empty (0 bytes)" in err, (out, err)


def test_no_name_becomes_a_formula(tmp_path):
    "Cases whose names begin as formulas: in the table for spreadsheets an apostrophe stands in front, and the name is whole."
    root, names = labelled(tmp_path / "data"), ["=1+2", "+1", "-1", "@SUM(1)", "\tx", "=HYPERLINK(\"http:a\",\"b\")"]
    for i, n in enumerate(names):
        for folder in ("images", "labels"): (root / folder / f"c{i}.nii.gz").rename(root / folder / f"{n}.nii.gz")
    (root / "images/-1.nii.gz").write_bytes(b"")
    for i, n in ((6, "\x1b[2J\u202eP1_v1"), (7, "\x1b[2J\u202eP1_v2"), (8, "\x1b]0;a\x07")):
        for folder in ("images", "labels"): (root / folder / f"c{i}.nii.gz").rename(root / folder / f"{n}.nii.gz")
    (root / "images/\x1b]0;a\x07.nii.gz").write_bytes(b"")
    status, out, err = said("check", root, "--recipe", "segmentation", "--debug", "--threads", 1, "--csv", tmp_path / "a.csv")
    assert status == 0, err
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", out + err) and "\\x1b[2J\\u202eP1_v1" in out, "nor the codes of a terminal"
    status, trained, err = said("train", "segmentation", "--data-root", root, "--debug", "--threads", 1, "--run", tmp_path / "run", "--steps", 1)
    assert status == 0 and not re.search("[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\u202e]", trained + err) and "\\x1b]0;a\\x07 is left out" in err, err
    head, *rows = csv.reader((tmp_path / "a.csv").open(newline=""))
    assert {f"'{n}" for n in names} <= {r[0] for r in rows} and "-1.nii.gz: is empty" in str(rows)
    texts = [c for c in (*head, *(c for r in rows for c in r)) if not re.fullmatch(r"-?[\d.e+-]*", c)]
    assert not [c for c in texts if c[:1] in "=+-@\t\r"], texts


# labels

def test_labels_beside_images(tmp_path):
    def empty(m): m[:] = 0
    def border(m): m[0:2, 8, 8] = 1
    def outside(m): m[:] = 0; m[0:3, 0:3, 17:20] = 1; m[8, 8, 8] = 2
    root = labelled(tmp_path / "data", c1=empty, c2=border, c3=outside, c4=lambda m: m.__setitem__((8, 8, 8), 9))
    (root / "dataset.json").write_text('{"labels": {"background": 0, "organ": 1, "spot": 2, "never": 3}}')
    status, out, err = said("check", root, "--recipe", "segmentation", "--debug", "--threads", 1, "--precision", "fp32", "--csv", tmp_path / "a.csv", "--html", tmp_path / "a.html")
    assert status == 0, err
    rows = {r["case"]: r for r in csv.DictReader((tmp_path / "a.csv").open(newline=""))}
    assert rows["c0"]["label 1, mm³"] == "96.0" and rows["c0"]["label 2, mm³"] == "16.0" and "1: 48 voxels, 96 mm³" in out
    assert "is empty: it holds no label" in rows["c1"]["notes"] and "touches the border of the volume: 1;" in rows["c2"]["notes"]
    assert "holds nothing: 1 (100 %)" in rows["c3"]["notes"] and rows["c3"]["verdict"] != "quarantine", "a question, no verdict"
    assert rows["c4"]["verdict"] == "quarantine" and "holds label 9 (1 voxels)" in rows["c4"]["reason"]
    assert "label 3 never is in none of the 9 sound cases" in out
    for name in ("c0", "c5", "c6"): assert "is empty" not in rows[name]["notes"] and "border" not in rows[name]["notes"] and "nothing" not in rows[name]["notes"]
    assert (tmp_path / "a.html").read_text("utf-8").count("data:image/jpeg") == 10, "also of the image whose mask is odd"


@pytest.mark.skipif(not (DATA / "seg/hippocampus_msd").exists(), reason="no real data: set MEDLAB_DATA")
def test_no_false_alarm_on_real_labels():
    found = [c for c, _ in inspect_all(find_labelled(DATA / "seg/hippocampus_msd").cases)]
    notes = [f.text for c in found for f in c.findings if "holds nothing" in f.text or "is empty" in f.text]
    assert len(found) >= 5 and not notes and all({*c.facts["labels"]} == {"1", "2"} for c in found)


@pytest.mark.skipif(not (DATA / "dicom").exists(), reason="no real data: set MEDLAB_DATA")
def test_dicom_by_its_makers():
    "Every series of the archive is in the table, with a codec; what is refused has a kind of reason."
    checks = inspect_slices(find_slices(DATA / "dicom"), hu=False)
    table, known = dicom_table(checks), [c for c in checks if "dicom" in c.facts]
    note(f"{len(checks)} cases of real DICOM\n{table}")
    assert sum(sum(c.values()) for c in table.counts.values()) == len(known) >= 3 and all(len(k) == 4 for k in table.counts)
    assert {c.facts["dicom"]["codec"] for c in known if "codec" in c.facts["dicom"]} - {"unknown"}
    assert Report(checks).tables and "codec" in str(Report(checks))


# the page

def test_what_a_notebook_shows_is_bounded(many):
    root, bad, _ = many
    report = Report(inspect_cases(find_cases(root)))
    cell = report._repr_html_()
    assert len(cell) < 60_000 and cell.count("<tr") == 1 + min(40, MANY) and len(str(report)) < 30_000
    assert (MANY <= 40) or f"… and {MANY - 40:,} more" in cell
    assert OLD < 2e9
