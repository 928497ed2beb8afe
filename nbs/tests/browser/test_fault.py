"""A mark of the curves is clicked in a real JupyterLab: the sample that the network got, with what is not finite in it."""
import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_process_stays")
WARD = """from pathlib import Path
from medlab import Lab, Run, Trainer
from medlab.culprit.phantoms import write_ward
from medlab.recipes.origin import named_class
file = write_ward('project')
recipe = named_class(f'{file}:Ward')(data_root=str(Path('project/scans').resolve()))"""
RED = """() => { let n = 0; for (const c of document.querySelectorAll('.medlab-fault .medlab-viewer canvas')) { const { width, height } = c; if (!width || !height) continue;
    const d = c.getContext('2d').getImageData(0, 0, width, height).data; for (let k = 0; k < d.length; k += 4) if (d[k] > 190 && d[k + 1] < 110 && d[k + 2] < 90 && d[k + 3]) n++ } return n }"""  # pixels in the colour of what is not finite
OPEN = "() => { const f = document.querySelector('.medlab-fault'); return !!f && f.getBoundingClientRect().height > 60 && f.querySelectorAll('.medlab-viewer canvas').length > 0 }"


def shot(nb, name):
    "A picture of the page with the sample in sight, where SHOTS says so."
    if not os.environ.get("SHOTS"): return
    nb.page.locator(".medlab-fault").evaluate("e => e.scrollIntoView({ block: 'end' })")
    nb.page.mouse.move(5, 5)
    nb.page.wait_for_timeout(600)
    nb.page.screenshot(path=Path(os.environ["SHOTS"]) / name)


def marked(nb, kind):
    "The steps with an event of a kind."
    return json.loads(nb.kernel(f"print(__import__('json').dumps(sorted({{e.step for e in Run(path).events('{kind}')}})))"))


def point(nb, step, a, b):
    "Where a step is on the first canvas, in a view from a to b."
    canvas = nb.page.locator(".medlab-curves canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    return box["x"] + 52 + (step - a) / (b - a) * (box["width"] - 62), box["y"] + 0.55 * box["height"]


def zoom(nb, a, b):
    "Show these steps, and wait until the page does."
    nb.kernel(f"lab.curves.zoom({a}, {b})")
    nb.until("r => document.querySelector('.medlab-curves').dataset.answered === r", arg=f"{a} {b}")


def test_a_click_opens_the_sample_while_it_trains(notebook):
    nb = notebook(WARD, "path = 'runs/ward'\ntrainer = Trainer(recipe, path, device='cpu', threads=1, save_every=500)\ntrainer.start()\nlab = Lab(trainer, share=0)\nlab", size=(1240, 1300))
    nb.until_state("running")
    nb.wait("trainer.iteration > 20 and trainer.run.events('bad_sample') and trainer.run.events('drop')", 60)
    zoom(nb, 0, 12)
    hole, empty = marked(nb, "bad_sample")[0], next(s for s in marked(nb, "drop") if s not in marked(nb, "bad_sample"))
    nb.page.mouse.move(*point(nb, 11.5, 0, 12))
    assert nb.page.locator(".medlab-curves canvas").first.evaluate("c => getComputedStyle(c).cursor") == "crosshair", "no mark is here"
    nb.page.mouse.click(*point(nb, 11.5, 0, 12))
    nb.page.mouse.move(*point(nb, hole, 0, 12))
    nb.until("() => document.querySelector('.mc-note').textContent.startsWith('Click for the sample')")
    assert nb.page.locator(".medlab-curves canvas").first.evaluate("c => getComputedStyle(c).cursor") == "pointer"
    assert nb.kernel("print(lab.fault.layout.display, lab.fault.doing)") == "none", "a click beside every mark opens nothing"
    before = nb.kernel("print(trainer.iteration)")
    nb.page.mouse.click(*point(nb, hole, 0, 12))
    nb.until("() => document.querySelector('.medlab-fault').innerText.includes('training is not touched')")
    shot(nb, "fault_working.png")
    nb.until(OPEN, seconds=60)
    nb.until(f"() => ({RED})() > 20")
    text = nb.page.locator(".medlab-fault").inner_text()
    assert all(t in text for t in ("p02", "project/scans/p02.nii.gz", "24 NaN", "voxel (9, 14, 8)", "RAS", "not finite in the sample")), text
    assert nb.kernel("print(lab.fault.found.step, lab.fault.viewer.cursor)") == f"{hole} (9, 14, 8)"
    nb.wait(f"trainer.iteration > {before} + 20 and trainer.worker.alive")
    nb.until("() => { const b = document.querySelector('.medlab-fault .medlab-viewer canvas').getBoundingClientRect(); return b.top > 0 && b.bottom < innerHeight }")  # brought into sight
    shot(nb, "fault_hole.png")
    nb.page.mouse.click(*point(nb, empty, 0, 12))
    nb.wait("lab.fault.found and lab.fault.found.case == 'p04'", 60)
    nb.until("() => document.querySelector('.medlab-fault').innerText.includes('Standardize') && document.querySelector('.medlab-fault').innerText.includes('p04.nii.gz')")
    shot(nb, "fault_module.png")
    nb.theme(True)
    shot(nb, "fault_dark.png")
    nb.page.locator(".medlab-fault button", has_text="close").click()
    nb.until("() => document.querySelector('.medlab-fault').getBoundingClientRect().height === 0")
    nb.kernel("trainer.stop(); trainer.wait(); lab.close()")
    assert not nb.errors


def test_the_keyboard_opens_it_and_a_run_of_another_process(notebook):
    nb = notebook(WARD, "path = 'runs/other'\nrun = Trainer(recipe, path, device='cpu', threads=1).start(process=True)", "lab = Lab(path, share=0)\nlab", size=(1600, 1000))
    nb.until_state("running")
    nb.wait("run.step > 20", 90)
    zoom(nb, 0, 12)
    hole = marked(nb, "bad_sample")[0]
    nb.page.mouse.move(*point(nb, hole, 0, 12))
    nb.page.locator(".medlab-curves canvas").first.focus()
    nb.page.keyboard.press("Enter")
    nb.until(OPEN, seconds=90)
    nb.until(f"() => ({RED})() > 20")
    assert nb.kernel("print(lab.fault.found.case, run.state)") == "p02 running"
    shot(nb, "fault_wide.png")
    nb.kernel("(Path('project/scans/p05.nii.gz')).unlink()")
    nb.page.mouse.click(*point(nb, marked(nb, "drop")[0], 0, 12))
    nb.until("() => document.querySelector('.medlab-fault').innerText.includes('holds 5 now')", seconds=90)
    shot(nb, "fault_refused.png")
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    nb.kernel("lab.close()")
    assert not nb.errors
