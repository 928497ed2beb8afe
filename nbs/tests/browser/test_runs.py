"""Two runs of a list are ticked, and compared below it."""
import os
import shutil
import sqlite3
from pathlib import Path

OLD = Path(__file__).parents[1] / "fixtures" / "run_v1"
LIST = "from medlab.widgets.runs import RunList\nruns = RunList('runs', share=0, hz=4)\nruns"


def shot(nb, name):
    "A picture of the page, where SHOTS says so."
    if os.environ.get("SHOTS"): nb.page.screenshot(path=Path(os.environ["SHOTS"]) / name)


def test_runs_are_compared(notebook):
    for i, name in enumerate(("first", "second")):
        shutil.copytree(OLD, notebook.folder / "runs" / name)
        db = sqlite3.connect(notebook.folder / "runs" / name / "run.db")
        db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES('created', ?)", (str(float(i)),))
        db.commit()
        db.close()
    nb = notebook(LIST, size=(1240, 1200))
    nb.until("() => document.querySelectorAll('.medlab-runs tbody tr').length === 2")
    ticks, bar = nb.page.locator(".medlab-runs tbody input"), nb.page.locator(".mr-bar")
    assert not bar.is_visible()
    ticks.nth(0).check()
    assert "choose another" in bar.inner_text() and not bar.locator("button", has_text="Compare").is_visible()
    ticks.nth(1).check()
    bar.locator("button", has_text="Compare").click()
    nb.until("() => document.querySelector('.medlab-runs').dataset.compared === 'second first'", seconds=60)
    nb.until("() => [...document.querySelectorAll('.widget-html h4')].length > 1 && document.querySelector('.widget-html img')")
    assert not nb.page.locator(".medlab-panel").count(), "a tick opens no lab"
    for dark in (True, False):
        nb.theme(dark)
        shot(nb, f"compared_{'dark' if dark else 'light'}.png")
    bar.locator("button", has_text="Take away").click()
    nb.until("() => !document.querySelector('.widget-html h4') && document.querySelector('.mr-bar').hidden")
    assert not nb.errors, nb.errors
    nb.save()
    nb.kernel("heard, lost = runs._heard, []\nruns._heard = lambda m: lost.append(m) if m['t'] == 'hello' and not lost else heard(m)")
    nb.page.reload()
    nb.until("() => document.querySelectorAll('.medlab-runs tbody tr').length === 2", seconds=60)  # asked for until it is answered
    assert nb.kernel("print(len(lost))") == "1"
    nb.kernel("runs.close()")
