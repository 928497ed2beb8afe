"""What a user sees of the lab on screens of several sizes, in both themes, when its kernel is gone, and of a notebook that was saved."""
import json
import os
import shutil
import signal
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest

OLD = Path(__file__).parents[1] / "fixtures" / "run_v1"
UIS = ("lab/tree", pytest.param("notebooks", marks=[pytest.mark.long, pytest.mark.skipif(find_spec("notebook") is None, reason="Notebook 7 is not installed; it comes with: pip install 'notebook>=7.6'")]))
SEEN = """() => { const top = document.querySelector('.jp-WindowedPanel-outer, .jp-Notebook').getBoundingClientRect();
    const sight = e => { const r = e.getBoundingClientRect(); return r.width > 20 && r.top >= top.top - 1 && r.bottom <= top.bottom + 1 && r.left >= top.left && r.right <= top.right };
    return { planes: [...document.querySelectorAll('.medlab-viewer canvas')].map(sight), buttons: [...document.querySelectorAll('.mp-button')].filter(b => b.clientWidth).map(sight),
        panels: Object.fromEntries([...document.querySelectorAll('.mc-panel')].filter(p => !p.hidden).map(p => [p.querySelector('.mc-title').textContent, sight(p)])) } }"""
CUT = """() => { const area = document.querySelector('.jp-WindowedPanel-outer, .jp-Notebook'), out = area.scrollWidth > area.clientWidth + 1 ? ['the notebook scrolls sideways'] : [], right = document.querySelector('.medlab-lab').getBoundingClientRect().right;
    for (const e of document.querySelectorAll('.medlab-lab *')) {
        if (!e.clientWidth || e.matches('pre, input, option, style, .mp-switch')) continue;
        if (e.scrollWidth > e.clientWidth + 1 && !e.matches('.mv-status div')) out.push(`cut: ${e.className} ${e.textContent.slice(0, 40)}`);
        if (e.getBoundingClientRect().right > right + 1) out.push(`beyond the edge: ${e.className} ${e.textContent.slice(0, 40)}`) }
    return out }"""
LEGENDS = """() => [...document.querySelectorAll('.mc-panel')].filter(p => !p.hidden).map(p => [...p.querySelectorAll('.mc-legend button')].map(b => { const r = b.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }))"""
SMALL = """() => [...document.querySelectorAll('.medlab-curves *, .medlab-panel *')].filter(e => e.clientWidth && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.className + ' ' + e.textContent.slice(0, 30))"""
FONTS = """() => { window.fonts = new Set(); const own = CanvasRenderingContext2D.prototype, old = own.fillText; own.fillText = function (...a) { window.fonts.add(parseFloat(this.font.match(/([0-9.]+)px/)[1])); return old.apply(this, a) } }"""
CONTRAST = """() => { const lum = c => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return lum(c) } return 1 };
    return [...document.querySelectorAll('.mc-title, .mc-name, .mc-value, .mc-state, .mp-name, .mp-state, .mp-facts b, .mp-facts span, .mp-label, .medlab-runs td, .medlab-runs th')].filter(e => e.clientWidth && e.textContent.trim() && e.textContent !== '–').map(e => { const a = lum(getComputedStyle(e).color), b = ground(e); return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className, e.textContent.slice(0, 20)] }) }"""
WORDS = "() => [document.querySelector('.mp-state').innerText.trim(), document.querySelector('.mc-state').innerText.split(',')[0]]"
OUTPUTS = "() => [...document.querySelectorAll('.jp-OutputArea-child')].filter(e => e.offsetHeight > 3).map(e => [e.querySelector('img')?.naturalWidth ?? 0, e.innerText])"
DRAWN = "() => [...document.querySelectorAll('.medlab-viewer canvas')].filter(c => c.height > 50).length === 3 && document.querySelector('.medlab-curves')?.dataset.drawn"


def shot(nb, name):
    "A picture of the page, where SHOTS says so."
    if os.environ.get("SHOTS"): nb.page.mouse.move(5, 5); nb.page.wait_for_timeout(500); nb.page.screenshot(path=Path(os.environ["SHOTS"]) / f"{name}.png")


def resize(nb, width, height=1000):
    "Another window; the lab at the top of the page."
    nb.page.set_viewport_size(dict(width=width, height=height))
    nb.page.wait_for_timeout(700)
    nb.page.evaluate("() => document.querySelector('.medlab-lab').scrollIntoView()")
    nb.page.wait_for_timeout(500)


@pytest.fixture(scope="module")
def lab(module_notebook, server):
    "The lab of a run that was killed: every knob, eight groups of curves, a preview."
    shutil.copytree(OLD, server.root / "screen")
    nb = module_notebook("from medlab import Lab", "lab = Lab('../screen', share=1)\nlab", size=(1500, 1000))
    nb.until_state("killed")
    nb.until(DRAWN, seconds=60)
    return nb


def test_everything_is_in_sight(lab):
    "At 1500 × 1000, beside the browser of files: controls, curves with validation, and preview, without scrolling."
    resize(lab, 1500)
    seen = lab.page.evaluate(SEEN)
    shot(lab, "screen_1500")
    assert seen["planes"] == [True] * 3 and len(seen["buttons"]) == 5 and all(seen["buttons"]), seen
    assert lab.page.evaluate("() => { const t = document.querySelector('.mp-trouble'), r = document.querySelector('.mp-rest'); return t.scrollHeight <= t.clientHeight + 1 && r.clientHeight > 300 && r.scrollHeight > r.clientHeight }"), "what went wrong is told in full, above the controls, which scroll"
    assert len(seen["panels"]) == 8 and all(seen["panels"].values()), seen


@pytest.mark.parametrize("width", [700, 850, 1000, 1250, 1500, 2200])
def test_reflow(lab, width):
    resize(lab, width)
    assert not (cut := lab.page.evaluate(CUT)), cut
    boxes = [b for legend in lab.page.evaluate(LEGENDS) for i, a in enumerate(legend) for b in legend[:i] if min(a[2], b[2]) > max(a[0], b[0]) + 1 and min(a[3], b[3]) > max(a[1], b[1]) + 1]
    assert not boxes, "entries of a legend lie over each other"
    shot(lab, f"screen_{width}_reflow")


@pytest.mark.parametrize("dark", [True, False])
def test_legible(lab, dark):
    resize(lab, 1500)
    lab.page.evaluate(FONTS)
    lab.theme(dark)
    lab.until("t => document.querySelector('.medlab-curves').dataset.drawn === t", "dark" if dark else "light")
    assert not (small := lab.page.evaluate(SMALL)), small
    lab.until("() => window.fonts.size > 0")
    assert min(lab.page.evaluate("() => [...window.fonts]")) >= 11
    poor = [c for c in lab.page.evaluate(CONTRAST) if c[0] < 4.4]
    assert not poor, poor
    shot(lab, f"screen_{'dark' if dark else 'light'}")


def test_one_state_everywhere(notebook):
    "What the panel says of the run, the curves beside it say too: as written, out of reach, without a word, and cut off."
    nb = notebook(f"import shutil\nfrom pathlib import Path\nrun = Path(shutil.copytree({str(OLD)!r}, 'runs/one'))\nfrom medlab import Lab, Run\nlab = Lab(run, share=0)\nlab", "from medlab.run.sharing import hold\nlock = hold('runs/one')", size=(1500, 1000))
    both = lambda word, seconds=30: nb.until(f"w => ({WORDS})().every(t => t === w)", word, seconds)
    both("running")
    nb.kernel("lock.release()")
    both("killed")
    nb.kernel("shutil.move('runs/one', 'runs/away')")
    both("out of reach")
    nb.kernel("shutil.move('runs/away', 'runs/one')")
    both("killed")
    pid = int(nb.kernel("import os; print(os.getpid())"))
    os.kill(pid, signal.SIGSTOP)
    try: both("no word", 60)
    finally: os.kill(pid, signal.SIGCONT)
    both("killed")
    nb.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    both("cut off")
    shot(nb, "cut_off")


def reopened(nb, server, ui, trusted):
    "Open the notebook in another window, once no kernel of it is left."
    for s in server.api("sessions"): server.api(f"sessions/{s['id']}", "DELETE")
    again = nb.again((1500, 1500))
    again.until("() => document.querySelectorAll('.jp-OutputArea-child img').length === 3")
    again.page.wait_for_timeout(2500)
    shown = again.page.evaluate(OUTPUTS)
    shot(again, f"reopened_{ui[:3]}_{'trusted' if trusted else 'untrusted'}")
    pictures = [t for w, t in shown if w > 300]
    assert len(pictures) == 3 and not any("Error displaying" in t or "Loading widget" in t for _, t in shown), shown
    assert any("killed, step 25" in t for _, t in shown), "the table of the panel"
    assert sum("run this cell again" in t for _, t in shown) == (0 if trusted else 4), shown
    again.kernel("print('it runs')")
    again.run_all()
    again.until(DRAWN.replace("=== 3", ">= 3"), seconds=60)
    again.until("() => ![...document.querySelectorAll('.jp-OutputArea-child img')].some(e => e.clientWidth)")  # and lives again
    again.page.context.close()


@pytest.mark.parametrize("ui", UIS, ids=["lab", "seven"])
def test_a_saved_notebook_shows_what_it_showed(notebook, server, ui):
    "Opened again without its kernel: the picture of the lab, of curves, of a viewer and of a panel, and no error; while they live, the widgets and no picture."
    folder = f"{server.root}/still{ui[:3]}"
    shutil.copytree(OLD, folder)
    nb = notebook("import numpy as np\nfrom medlab import Lab\nfrom medlab.widgets.curves import Curves\nfrom medlab.widgets.panel import Panel\nfrom medlab.widgets.viewer import Viewer\n" + f"lab = Lab({folder!r}, share=1)\nlab",
        f"curves = Curves({folder!r})\ncurves", f"Panel({folder!r})", "Viewer(np.random.default_rng(0).normal(0, 1, (8, 40, 40)))", size=(1500, 1500), ui=ui)
    nb.until(DRAWN.replace("=== 3", ">= 3"), seconds=60)
    nb.wait("lab._still.key is not None and lab.preview.viewer is not None", 40)
    assert [len(o) for o in nb.outputs()] == [2, 2, 2, 2] and not any(w for w, _ in nb.page.evaluate(OUTPUTS)), "while it lives, there is no picture"
    nb.kernel("lab.tick(asked=True)")
    nb.until("() => JSON.stringify(window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells[0].toJSON().outputs[0].data).length > 20000")
    saved = nb.save()
    assert len(saved) < 300_000 and b"widget-state" not in saved, len(saved)
    errors = [e for e in nb.errors if not any(k in e for k in ("'filebrowser:open-path' not registered", "(reading 'schema')"))]  # Notebook 7.6's own
    assert not errors, errors
    reopened(nb, server, ui, True)
    nb.path.write_bytes(json.dumps({**json.loads(saved), "nbformat_minor": 4} | {"metadata": {**json.loads(saved)["metadata"], "from": "elsewhere"}}).encode())  # what was signed is another
    reopened(nb, server, ui, False)


def test_a_list_of_runs(notebook):
    "A click opens the lab of a run, another one that of another, and the same one closes it; names are text."
    root = notebook.folder / "runs"
    for i, name in enumerate(("first", "<img src=x onerror=window.hacked=1>")):
        shutil.copytree(OLD, root / name)
        db = sqlite3.connect(root / name / "run.db")
        db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES('created', ?)", (str(float(i)),))
        db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES('best', ?)", (json.dumps(dict(metric="psnr", value=21.25, step=20, rank=1)),))
        db.commit()
        db.close()
    nb = notebook("from medlab import Run\nfrom medlab.widgets.runs import RunList\nRun.list('runs')", "runs = RunList('runs', share=0, hz=4)\nruns", size=(1500, 1400))
    static = nb.page.locator(".jp-RenderedHTML table").first
    assert static.locator("svg").count() == 2 and "psnr 21.25 at 20" in static.inner_text() and "killed" in static.inner_text()
    rows = nb.page.locator(".medlab-runs tbody tr")
    nb.until("() => document.querySelectorAll('.medlab-runs tbody tr').length === 2")
    text = rows.nth(1).inner_text().split("\t")
    assert [t.strip() for t in text[:5]] == ["first", "Restoration", "killed", "25 / 35", "psnr 21.25 at 20"] and text[5].strip() == "0.123", text
    assert rows.nth(1).locator("path").first.get_attribute("d").count("L") > 10
    rows.nth(1).click()
    nb.until_state("killed")
    assert nb.page.locator(".mp-name").inner_text() == "first" and rows.nth(1).get_attribute("aria-expanded") == "true"
    shot(nb, "runs_light")
    rows.nth(0).focus()
    nb.page.keyboard.press("Enter")
    nb.until("() => document.querySelector('.mp-name')?.textContent.startsWith('<img') && document.querySelectorAll('.medlab-panel').length === 1")
    nb.theme(True)
    poor = [c for c in nb.page.evaluate(CONTRAST) if c[0] < 4.4]
    assert not poor, poor
    shot(nb, "runs_dark")
    rows.nth(0).click()
    nb.until("() => !document.querySelector('.medlab-panel')")
    nb.kernel("import shutil; shutil.copytree('runs/first', 'runs/third')")
    nb.until("() => document.querySelectorAll('.medlab-runs tbody tr').length === 3")
    assert nb.page.evaluate("() => window.hacked") is None and nb.page.locator(".medlab-runs img").count() == 0 and not nb.errors, nb.errors
