"""Tables that were measured once: each says with what, and which of them were measured with other code is listed."""
import importlib.util
import math
import shutil
import subprocess
import sys
import warnings
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    "A script of nbs/bench as a module."
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "nbs" / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load("run")
stamp = bench.stamp
REAL = stamp.notebooks(ROOT)


# the project's own tables

@pytest.mark.parametrize("name", REAL)
def test_every_kept_table_carries_a_stamp_or_says_that_it_has_none(name):
    nb = stamp.load(REAL[name])
    assert not (stamp.kept(nb) and (why := stamp.wrong(nb))), f"{REAL[name]} {why}; see nbs/bench/run.py"


def test_tables_of_other_code_are_listed():
    code = stamp.Code(ROOT)
    states = {name: bench.state(path, code) for name, path in REAL.items() if stamp.kept(stamp.load(path))}
    old = [f"{name}: {bench.brief(found, 80)}" for name, (at, found) in states.items() if found or not at]
    text = "tables that do not speak of this code:\n" + "\n".join(old)
    if old: warnings.warn(text)  # a UserWarning: pytest-xdist stops at a class that it cannot import


def test_settings_keep_the_stamp_and_skip_slow_cells():
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    assert stamp.KEY in ini["DEFAULT"]["allowed_metadata_keys"].split()
    assert {"slow", "cuda"} <= set(ini["DEFAULT"]["tst_flags"].split())


# a small checkout

FILES = {
    "medlab/__init__.py": "import lazy_loader\n__getattr__, __dir__, __all__ = lazy_loader.attach(\n"
                          "    __name__, submodules=['parts'], submod_attrs={'two': ['Two']})\n",
    "medlab/one.py": "# %% ../nbs/00_one.ipynb #1\nfrom .three import third\n\ndef value(): return third() + 1\n",
    "medlab/two.py": "Two = 2\n",
    "medlab/three.py": "def third():\n    from .parts.four import FOUR\n    return FOUR\n",
    "medlab/parts/__init__.py": "",
    "medlab/parts/four.py": "from .. import five\nFOUR = 4\n",
    "medlab/five.py": "",
    "nbs/tests/process/toys.py": "from medlab import Two\n",
}
USED = {"medlab", "medlab.one", "medlab.three", "medlab.parts", "medlab.parts.four", "medlab.five"}
CELLS = ["import sys\nfrom medlab.one import value",
         "#| slow\nprint(value())\nprint('a warning', file=sys.stderr)",
         "#| cuda\nraise SystemError('there is no GPU')"]
OLD = [new_output("stream", name="stdout", text="an old table\n")]


def notebook(root, name, *sources, old=True):
    "Write a notebook of these cells, with an old table in the slow ones."
    cells = [new_code_cell(s, outputs=OLD if old and "slow" in s else [], id=f"cell{i}") for i, s in enumerate(sources)]
    nb = new_notebook(cells=[new_markdown_cell("# A table", id="head"), *cells])
    nb.metadata["kernelspec"] = dict(name="python3", language="python", display_name="python3")
    path = root / "nbs" / "bench" / f"{name}.ipynb"
    nbformat.write(nb, path)
    return path


def checkout(root):
    "A small project."
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "nbs" / "bench").mkdir()
    notebook(root, "tiny", *CELLS)
    return root


def run(root, *words): return bench.main([*words, "--root", str(root)])
def changed(root, name="tiny"): return stamp.changed(stamp.load(stamp.notebooks(root)[name]), stamp.Code(root))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch): monkeypatch.setattr(bench, "gpu", lambda: None)


@pytest.fixture
def tiny(tmp_path): return checkout(tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    "A small project whose table was measured."
    with pytest.MonkeyPatch.context() as m:
        m.setattr(bench, "gpu", lambda: None)
        root = checkout(tmp_path_factory.mktemp("once"))
        assert run(root) == 0
    return root


@pytest.fixture
def measured(once, tmp_path): return shutil.copytree(once, tmp_path / "copy")


def test_a_table_is_measured_and_stamped(measured):
    nb = nbformat.read(measured / "nbs/bench/tiny.ipynb", as_version=4)
    made = nb.metadata[stamp.KEY]
    assert [o.get("text") for o in nb.cells[2].outputs] == ["5\n"], "the new table, without what went to standard error"
    assert set(made["code"]) == USED and changed(measured) == [] and stamp.wrong(nb) == ""
    last = nb.cells[-1].source
    assert last == stamp.sentence(made) and last.startswith("Measured at commit unknown on ")
    assert not nb.cells[3].outputs and made["seconds"] >= 0 and made["machine"]["cores"] >= 1


def test_measuring_again_leaves_the_same_cells(measured):
    path = measured / "nbs/bench/tiny.ipynb"
    before = stamp.load(path)
    assert run(measured, "tiny") == 0
    after = stamp.load(path)
    assert after["cells"] == before["cells"] and path.read_text().count("Measured at commit") == 1


def test_nbdev_keeps_the_file_as_it_is(measured):
    from nbdev.clean import clean_nb
    from execnb.nbio import nb2str, read_nb
    path = measured / "nbs/bench/tiny.ipynb"
    nb = read_nb(path)
    clean_nb(nb, allowed_metadata_keys=[stamp.KEY])
    assert nb2str(nb) == path.read_text()


@pytest.mark.parametrize("module", sorted(USED - {"medlab", "medlab.parts"}))
def test_a_changed_module_is_listed(measured, capsys, module):
    path = stamp.Code(measured).file(module)
    path.write_text(path.read_text() + "\nMORE = 1\n")
    assert changed(measured) == [module]
    run(measured, "--list")
    assert capsys.readouterr().out.endswith(f" {module.removeprefix('medlab.')}\n")


def test_what_a_table_does_not_use_changes_nothing(measured, capsys):
    for name in ("medlab/two.py", "nbs/tests/process/toys.py"): (measured / name).write_text("more = 1\n")
    one = measured / "medlab/one.py"
    one.write_text(one.read_text().replace("00_one.ipynb #1", "run/00_one.ipynb #2"))
    assert changed(measured) == []
    run(measured, "--list")
    assert capsys.readouterr().out.endswith(" nothing\n")


def test_a_module_that_went_away_and_cells_that_changed_are_listed(measured):
    (measured / "medlab/five.py").unlink()
    path = measured / "nbs/bench/tiny.ipynb"
    path.write_text(path.read_text().replace("print(value())", "print(value(), 1)"))
    assert changed(measured) == ["medlab.five", "its own cells"]


@pytest.mark.parametrize("source, uses", [
    ("from medlab import Two", {"medlab", "medlab.two"}),
    ("import medlab\nmedlab.Two", {"medlab", "medlab.two"}),
    ("import medlab as m\nm.__version__", {"medlab"}),
    ("import medlab\nprint(medlab)", {"medlab", "medlab.two", "medlab.parts"}),
    ("from medlab import parts\nparts.four", {"medlab", "medlab.parts"}),
    ("%time x\nimport toys", {"medlab", "medlab.two", "nbs/tests/process/toys.py"}),
    ("run('toys.py')", {"medlab", "medlab.two", "nbs/tests/process/toys.py"}),
    ("P = '''\nfrom medlab.two import Two\nx = {\n'''", {"medlab", "medlab.two"}),
    ("import torch, numpy.medlab", set()),
], ids=range(9))
def test_imports_are_read(tiny, source, uses):
    notebook(tiny, "other", source, "#| slow\n1")
    assert set(stamp.Code(tiny).of(stamp.load(tiny / "nbs/bench/other.ipynb"))) == uses


def test_a_failing_cell_leaves_the_old_table(tiny, capsys):
    path = notebook(tiny, "broken", "x = 0", "#| slow\nprint(1)", "#| slow\n1 / x")
    before = path.read_bytes()
    assert run(tiny) == 1
    out = capsys.readouterr().out
    assert path.read_bytes() == before and "cell 3 (1 / x): ZeroDivisionError: division by zero" in out
    assert "measured: tiny\nfailed: broken\nleft: none" in out, "the others are measured all the same"
    found = nbformat.read(path.parent / ".partial/broken.ipynb", as_version=4)
    assert found.cells[2].outputs[0].text == "1\n" and set(stamp.notebooks(tiny)) == {"tiny", "broken"}, "an hour's table is not lost"
    assert not (path.parent / ".partial/tiny.ipynb").exists()


def test_a_kernel_that_dies_is_a_failure(tiny, capsys):
    path = notebook(tiny, "dying", "#| slow\nimport os\nos._exit(1)")
    before = path.read_bytes()
    assert run(tiny, "dying") == 1 and path.read_bytes() == before
    assert "cell 1 (import os): the kernel died" in capsys.readouterr().out


def test_no_budget_runs_nothing_and_says_so(tiny, capsys):
    path = tiny / "nbs/bench/tiny.ipynb"
    before = path.read_bytes()
    assert run(tiny, "--minutes", "0") == 0 and path.read_bytes() == before
    out = capsys.readouterr().out
    assert out == "measured: none\nfailed: none\nleft: tiny\nwhat is left did not fit into 0 minutes\n"


def test_what_took_longer_than_is_left_is_not_started(measured, capsys):
    nb = nbformat.read(measured / "nbs/bench/tiny.ipynb", as_version=4)
    nb.metadata[stamp.KEY]["seconds"] = 61
    nbformat.write(nb, measured / "nbs/bench/tiny.ipynb")
    assert run(measured, "--minutes", "1") == 0
    out = capsys.readouterr().out
    assert "left: tiny" in out and "started" not in out


def test_what_runs_when_the_time_is_over_is_ended(tiny, capsys):
    path = notebook(tiny, "endless", "#| slow\nimport time\ntime.sleep(600)")
    before = path.read_bytes()
    assert run(tiny, "endless", "--minutes", "0.05") == 0 and path.read_bytes() == before
    out = capsys.readouterr().out
    assert "ended in cell 1 (import time), for the time is over" in out and "left: endless" in out


def test_the_quickest_comes_first_and_the_unknown_last(tiny):
    for name, seconds in dict(a=None, b=30, c=5).items():
        nb = nbformat.read(notebook(tiny, name, "#| slow\n1"), as_version=4)
        if seconds: nb.metadata[stamp.KEY] = dict(seconds=seconds)
        nbformat.write(nb, tiny / f"nbs/bench/{name}.ipynb")
    assert bench.planned(stamp.notebooks(tiny)) == ["c", "b", "a", "tiny"]


MEETS = """#| slow
import time
from pathlib import Path
Path("here-{0}").touch()
end = time.monotonic() + {2}
while not Path("here-{1}").exists() and time.monotonic() < end: time.sleep(0.05)
assert Path("here-{1}").exists()"""


@pytest.mark.parametrize("timed", [set(), {"b"}], ids=["side by side", "one is timed"])
def test_what_measures_no_time_runs_two_at_a_time(tiny, monkeypatch, capsys, timed):
    "Two notebooks that wait for each other; where one of them measures time it runs alone, and waits in vain."
    monkeypatch.setattr(bench, "UNTIMED", {"a", "b"} - timed)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {0, 1})
    for name, other in ("ab", "ba"): notebook(tiny, name, MEETS.format(name, other, 3 if timed else 60))
    assert run(tiny, "a", "b") == bool(timed)
    assert ("failed: b" in capsys.readouterr().out) == bool(timed)


def test_those_that_measure_no_time_are_there(): assert set(REAL) > bench.UNTIMED


def test_only_what_is_named_is_run(tiny, capsys):
    notebook(tiny, "quick", "print(1)")
    notebook(tiny, "more", "#| slow\n1")
    assert set(bench.choose(tiny, ["nbs/bench/more.ipynb"])) == {"more"}
    assert set(bench.choose(tiny, [])) == {"tiny", "more"}
    with pytest.raises(SystemExit) as e: run(tiny, "quick")
    said = capsys.readouterr().out
    assert e.value.code == 2 and said == "no notebook with slow cells is called quick; there are more, tiny\n"


@pytest.mark.parametrize("text, bar", [
    ("  0%|          | 0/16 [00:00<?, ?it/s]", True), ("latents of 16 cases are there: 0.019 GB: 0it [00:00, ?it/s]", True),
    ("HBox(children=(IntProgress(value=0),))", True), ("IntSlider(value=3)", False), ("3it is a name [00]", False)])
def test_progress_bars_are_not_kept_but_other_widgets_are(text, bar):
    data = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": text}
    assert bench.is_progress(dict(output_type="display_data", data=data)) == bar
    assert not bench.is_progress(dict(output_type="display_data", data={"text/plain": text}))


def test_a_table_without_a_stamp_is_wrong_until_it_says_so(tiny, measured):
    path = tiny / "nbs/bench/tiny.ipynb"
    assert stamp.kept(stamp.load(path)) and stamp.wrong(stamp.load(path)) == "keeps tables without a stamp"
    run(tiny, "--mark")
    assert stamp.wrong(stamp.load(path)) == "" and changed(tiny) is None
    nb = stamp.load(measured / "nbs/bench/tiny.ipynb")
    del nb["metadata"][stamp.KEY]["code"]
    assert stamp.wrong(nb) == "has a stamp without code"


def test_a_notebook_that_is_changed_while_it_runs_is_left_alone(tiny, capsys):
    path = notebook(tiny, "edited", "#| slow\nopen('edited.ipynb', 'a').write('\\n')")
    assert run(tiny, "edited") == 1
    assert path.read_text().count("an old table") == 1 and "was changed while it ran" in capsys.readouterr().out


def test_the_commit_says_whether_the_code_is_its_own(tiny):
    path = tiny / "nbs/bench/tiny.ipynb"
    author = "-c", "user.name=a", "-c", "user.email=a@b"
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tiny, check=True)
    commit = lambda: stamp.commit(tiny, stamp.load(path), path)
    clean = commit()
    assert len(clean) == 7 and clean == stamp.git(tiny, "rev-parse", "HEAD")[:7]
    text = path.read_text()
    path.write_text(text.replace("an old table", "a new one"))
    notebook(tiny, "other", "#| slow\n1")
    assert commit() == clean, "new tables, and other notebooks, are no other code"
    path.write_text(text.replace("print(value())", "print(1)"))
    assert commit() == clean + "+"
    path.write_text(text)
    (tiny / "medlab/six.py").write_text("")
    assert commit() == clean + "+"


def test_the_command_runs_from_anywhere(tmp_path):
    command = [sys.executable, ROOT / "nbs/bench/run.py", "--list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 1 + len(REAL), done.stderr
    assert max(map(len, lines)) <= bench.WIDTH and lines[0].split() == ["notebook", "cells", "took", "measured", "changed", "since"]


def test_what_changed_is_listed_as_far_as_it_fits():
    many = ["medlab", *(f"medlab.part.room{i}" for i in range(20)), "its own cells"]
    assert bench.brief(many, math.inf).endswith("part.room19, its own cells") and bench.brief([], 40) == "nothing"
    assert bench.brief(many, 42) == "medlab, part.room0, part.room1 and 19 more"
    assert bench.brief(many, 41) == "medlab, part.room0 and 20 more"
    assert bench.brief(many[1:], 12) == "21 changes"
