"""The live lab as its tutorial shows it, in a real JupyterLab: a thread, a process that outlives its kernel, faults, and another browser."""
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_process_stays")
TUTORIAL = Path(__file__).parents[2] / "tutorials" / "live_lab.ipynb"
SLICES = "from medlab import Lab, Run, Trainer, recipes\nslices = dict(image_size=(32, 32), dim=8, blocks=(1,), refinement=0, batch_size=1, phantoms=8)"
COLUMNS = """() => [...document.querySelectorAll('.mv-column, .medlab-viewer canvas')].length"""


def cells(until):
    "The code of the tutorial up to the first cell that holds a text."
    code = ["".join(c["source"]) for c in json.loads(TUTORIAL.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    at = next(i for i, c in enumerate(code) if until in c)
    return [c for c in code[:at + 1] if "IN_TEST" not in c]


def ask(nb, knob, value):
    "Type a value into a knob."
    field = nb.page.locator(f".mp-row[data-knob={knob}] input[type=text]")
    field.fill(value)
    field.press("Enter")


def shot(nb, name):
    "A picture of the page, where SHOTS says so."
    if not os.environ.get("SHOTS"): return
    nb.page.locator(".medlab-panel").first.scroll_into_view_if_needed()
    nb.page.mouse.move(5, 5)
    nb.page.wait_for_timeout(500)
    nb.page.screenshot(path=Path(os.environ["SHOTS"]) / name)


def test_the_tutorial(notebook):
    nb = notebook(*cells("lab = Lab(trainer)"), size=(1240, 1500))
    nb.until_state("running")
    nb.wait("trainer.iteration > 3 and lab.preview.viewer is not None", 60)
    nb.page.locator(".medlab-viewer").first.wait_for(timeout=90_000)
    before = nb.kernel("print(trainer.iteration)")
    nb.page.locator("[data-fix=norm_eps] .mp-switch").click()
    nb.until_fate("norm_eps", "applied")
    ask(nb, "lr", "2e-4")
    nb.until_fate("lr", "applied")
    nb.wait("trainer.knobs.norm_eps == 1e-4 and trainer.knobs.lr == 2e-4 and trainer.worker.thread.is_alive()")
    steps = json.loads(nb.kernel("print(__import__('json').dumps([[c.applied_step, c.verified, c.source] for c in trainer.run.changes()]))"))
    assert all(verified and step > int(before) for step, verified, _ in steps) and [s[2] for s in steps] == ["panel", "panel"]
    ask(nb, "lr", "99")
    nb.until("() => document.querySelector('.mp-row[data-knob=lr] .mp-why').innerText.includes('must be a finite number in (0, 10]')")
    nb.wait("'step' in lab.preview.status.value", 60)
    drawn = nb.kernel("print(lab.preview.status.value)")
    nb.wait(f"lab.preview.status.value.startswith('step') and lab.preview.status.value != {drawn!r}", 60)  # live: predicted again
    for dark in (False, True):
        nb.theme(dark)
        shot(nb, f"lab_{'dark' if dark else 'light'}.png")
    height = nb.page.locator(".medlab-panel").first.evaluate("e => e.closest('.jp-OutputArea-output').getBoundingClientRect().height")
    nb.wait(f"trainer.iteration > {int(before) + 20}", 60)
    assert nb.page.locator(".medlab-panel").first.evaluate("e => e.closest('.jp-OutputArea-output').getBoundingClientRect().height") == height, "no layout jumps while it runs"
    assert len(nb.save()) < 300_000
    nb.page.set_viewport_size(dict(width=1000, height=1500))
    nb.until("() => [...document.querySelectorAll('.medlab-viewer canvas')].every(c => c.height > 20 && c.width > 20)")  # drawn anew after predictions replaced what it was made of
    nb.page.reload()
    nb.until_state("running")
    nb.page.locator(".medlab-viewer canvas").first.wait_for(timeout=90_000)
    nb.page.locator(".medlab-curves canvas").first.wait_for(timeout=90_000)
    nb.until("() => { const c = document.querySelector('.medlab-curves'), w = c.querySelector('canvas').clientWidth; return w && Math.abs(Number(c.dataset.width) - w) < 0.1 * w }")  # as many columns as pixels
    assert nb.page.evaluate("() => getComputedStyle(document.querySelector('.medlab-curves')).getPropertyValue('--mc-fg').trim()")
    nb.kernel("trainer.stop(); trainer.wait(); lab.close()")
    assert not nb.errors


def test_a_process_outlives_its_kernel(notebook):
    nb = notebook(SLICES, "run = Trainer(recipes.Restoration(**slices), 'runs/long', device='cpu', threads=1).start(process=True)", "lab = Lab('runs/long')\nlab", size=(1240, 1500))
    nb.until_state("running")
    nb.wait("run.step > 10", 60)
    first = json.loads(nb.kernel("print(__import__('json').dumps([run.environment['pid'], run.step]))"))
    nb.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    nb.until("() => { const p = document.querySelector('.medlab-panel'); return p.dataset.dead === 'true' && p.querySelector('.mp-buttons').inert && p.querySelector('.mp-said').innerText.includes('Run its cell again') }")  # what is pressed now would reach nobody
    shot(nb, "dead.png")
    nb.kernel("from medlab import Lab, Run; import numpy as np; run = Run('runs/long'); assert 'trainer' not in globals()")
    nb.page.evaluate("() => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = 2; window.jupyterapp.commands.execute('notebook:run-cell') }")
    nb.until_state("running")
    nb.wait(f"run.step > {first[1]} + 20", 60)
    ask(nb, "norm_eps", "2e-4")
    nb.until_fate("norm_eps", "applied")
    nb.save()
    again = nb.again((1240, 1500))
    again.until_state("running")
    again.until("() => document.querySelector('.mp-row[data-knob=norm_eps] input[type=text]')?.value === '2e-4'")  # another browser sees the same
    again.page.locator(".mp-buttons button", has_text="Pause").click()
    nb.until_state("paused")
    nb.page.locator(".mp-buttons button", has_text="Resume").click()
    again.until_state("running")
    again.page.context.close()
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    nb.wait("not any(np.diff(run.metrics('loss')['loss'].step) - 1) and not run.events('resume')[1:]")  # not a step was missed or made twice
    assert json.loads(nb.kernel("print(run.environment['pid'])")) == first[0]
    assert nb.kernel("print([(c.source, c.new, c.verified) for c in run.changes()])") == "[('panel', {'norm_eps': 0.0002}, True)]"
    shot(nb, "process.png")
    nb.page.locator(".mp-buttons button", has_text="Start").click()  # and on: another process takes it up
    nb.until_state("running")
    nb.wait(f"run.environment['pid'] != {first[0]}", 60)
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    assert not nb.errors


@pytest.mark.skipif(find_spec("notebook") is None, reason="Notebook 7 is not installed; it comes with: pip install 'notebook>=7.6'")
def test_notebook_7(notebook):
    nb = notebook(SLICES, "trainer = Trainer(recipes.Restoration(**slices), 'runs/seven', device='cpu', threads=1)\ntrainer.start()\nlab = Lab(trainer)\nlab", size=(1240, 1500), ui="notebooks")
    nb.until_state("running")
    nb.page.locator("[data-fix=norm_eps] .mp-switch").click()
    nb.until_fate("norm_eps", "applied")
    nb.wait("trainer.knobs.norm_eps == 1e-4 and lab.preview.viewer is not None")
    for part in ("viewer", "curves"): nb.page.locator(f".medlab-{part} canvas").first.wait_for(timeout=90_000)
    shot(nb, "seven.png")
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    nb.kernel("lab.close(); trainer.close()")
    errors = [e for e in nb.errors if not any(k in e for k in ("'filebrowser:open-path' not registered", "(reading 'schema')"))]  # Notebook 7.6's own
    assert not errors, errors
