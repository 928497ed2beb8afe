"""Curves in a real JupyterLab: a run that trains in a thread of the kernel while its curves move, and every promise of the widget."""
import os
from pathlib import Path

import pytest

ROW = """() => { const r = document.querySelector('.medlab-curves'); return r && Number(r.dataset.updates || 0) }"""
RED = """i => { const c = document.querySelectorAll('.medlab-curves canvas')[i], d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;
    for (let k = 0; k < d.length; k += 4) if (d[k] > 180 && d[k] > d[k + 1] + 90 && d[k] > d[k + 2] + 90 && d[k + 3] > 150) n++; return n }"""
BEHIND = "() => getComputedStyle(document.querySelector('.medlab-curves')).backgroundColor"
FOLDED = "() => [...document.querySelectorAll('.mc-folded button')].map(e => e.textContent)"
SPY = """() => { window.drawn = []; for (const f of ['fillText']) { const old = CanvasRenderingContext2D.prototype[f]; CanvasRenderingContext2D.prototype[f] = function (t, ...a) { window.drawn.push(t); if (window.drawn.length > 5000) window.drawn.splice(0, 2500); return old.call(this, t, ...a) } } }"""

TRAIN = """
from dataclasses import dataclass
import math, time, torch
from torch import nn
from medlab import Trainer
from medlab.recipes.base import Recipe

@dataclass
class Toy(Recipe):
    "Fit y = Σx from 64 samples, at a pace that an eye can follow."
    name = "toy"
    def build_model(self): return nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1))
    def dataset(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return [dict(x=a, y=a.sum(0, keepdim=True), case=f"toy{i}") for i, a in enumerate(x)]
    def prepare(self, batch, seed, step): time.sleep(0.01); return batch
    def losses(self, model, batch):
        l = (model(batch["x"]) - batch["y"]).square().mean(1)
        return dict(loss=l, l1=l.sqrt())

trainer = Trainer(Toy(batch_size=8), "runs/live", lr=1e-2, device="cpu", threads=1)
trainer.start(steps=100_000)
"""
SHOW = "from medlab.widgets.curves import Curves\ncurves = Curves(trainer)\ncurves"
HOSTILE = "<img src=x onerror=window.hacked=1>"
PAST = f"""
import json, numpy as np
from pathlib import Path
from medlab.run.store import Store
from medlab.run.directory import write_columns

def past(name, n, scale, seed=0):
    "A finished run with a NaN, an infinity, skips and a change."
    Path("runs", name).mkdir(parents=True)
    store, rng, step = Store(Path("runs", name, "run.db")), np.random.default_rng(seed), np.arange(1, n + 1)
    store.write("INSERT INTO segments(id, step, time, info) VALUES(0, 0, 0, '{{}}')").result()
    store.set_meta(state="done")
    l1 = scale * (0.05 + 0.6 * np.exp(-step / (n / 6))) * rng.lognormal(0, 0.15, n)
    norm, skipped = 2 * l1 * rng.lognormal(0, 0.4, n), np.zeros(n)
    skipped[n // 2:n // 2 + 3] = 1
    loss = 1.3 * l1
    loss[n // 2:n // 2 + 3], l1[n // 4] = np.nan, np.inf
    loss[n // 3] = 60
    write_columns(store, step, dict(loss=loss, l1=l1, fft=0.3 * loss, lr=np.where(step < 0.7 * n, 1e-3, 2e-4), grad_norm=norm, clip=np.minimum(1, 0.5 / norm), scale=65536 * 2.0 ** -np.cumsum(skipped),
        skipped=skipped, mem_gb=2 + 0.5 * step / n, gpu_gb=9 + np.sin(step / n * 9), samples_per_s=rng.normal(40, 2, n)))
    write_columns(store, np.arange(n // 10, n + 1, n // 10), dict(val_psnr=np.linspace(24, 31, 10) + rng.normal(0, 0.3, 10)))
    put = "INSERT INTO events(time, step, kind, level, text, data) VALUES(0,?,?,?,?,'{{}}')"
    for i in range(3): store.write(put, n // 2 + i + 1, "skip", "warning", f"step {{n // 2 + i + 1}} was skipped (NaN in the gradient)")
    store.write(put, n // 5, "bad_sample", "warning", {HOSTILE!r})
    store.write("INSERT INTO changes(time, source, requested, at, state, step, old, new, verified) VALUES(0,'panel','{{}}',NULL,'applied',?,?,?,1)", int(0.7 * n), json.dumps(dict(lr=1e-3)), json.dumps(dict(lr=2e-4))).result()
    store.close()
"""


def updates(nb): return nb.page.evaluate(ROW)


def wait_updates(nb, n): nb.until(f"() => ({ROW})() >= {n}")


def box(nb, i): return nb.page.locator(".medlab-curves canvas").nth(i).bounding_box()


def drag(nb, i, a, b):
    "Drag over a panel, from a share of its width to another."
    at = box(nb, i)
    x, w, y = at["x"] + 52, at["width"] - 62, at["y"] + at["height"] / 2
    nb.page.mouse.move(x + a * w, y)
    nb.page.mouse.down()
    nb.page.mouse.move(x + b * w, y, steps=6)
    nb.page.mouse.up()


def shot(nb, name, i=0):
    "A picture of the widget, where SHOTS says so."
    nb.page.mouse.move(5, 5)
    if os.environ.get("SHOTS"): nb.page.wait_for_timeout(200); nb.page.locator(".medlab-curves").nth(i).screenshot(path=Path(os.environ["SHOTS"]) / name)


def test_curves_move_while_a_thread_trains(notebook):
    nb = notebook(TRAIN, SHOW)
    wait_updates(nb, 3)
    nb.until(f"() => ({FOLDED})().includes('learning rate0.01') && ({FOLDED})().includes('validation–')")  # what stands still is a number
    title = nb.page.locator(".mc-panel", has=nb.page.locator(".mc-title", has_text="learning rate"))
    assert not title.is_visible() and nb.page.locator(".mc-panel", has=nb.page.get_by_text("loss", exact=True)).first.is_visible()
    nb.page.locator(".mc-folded button", has_text="learning rate").click()  # a click shows its curve, another folds it
    title.wait_for()
    title.get_by_role("button", name="Fold learning rate").click()
    nb.until(f"() => ({FOLDED})().includes('learning rate0.01')")
    before = updates(nb)
    nb.kernel("trainer.set(lr=2e-3).wait(20)")
    wait_updates(nb, before + 6)
    nb.until(f"() => !({FOLDED})().some(t => t.startsWith('learning rate'))")  # it moved
    heights = nb.page.locator(".medlab-curves").bounding_box()["height"]
    nb.page.evaluate(SPY)
    nb.until("() => window.drawn.some(t => t.startsWith('lr → 0.002'))")
    nb.wait("trainer.iteration > 60")
    nb.until("() => Number(document.querySelector('.medlab-curves').dataset.last) > 60")
    assert nb.page.locator(".mc-state").first.inner_text().startswith("running, step ")
    assert nb.page.locator(".medlab-curves").bounding_box()["height"] == heights, "no layout jumps while it runs"
    nb.page.keyboard.press("Escape")
    shot(nb, "live.png")
    nb.kernel("import shutil; trainer.stop(); trainer.wait(20); shutil.move('runs/live', 'runs/gone')")
    nb.until("() => document.querySelector('.mc-note').textContent.includes('is gone')")
    assert nb.kernel("print(curves._clock.thread.is_alive())") == "True"
    nb.kernel("shutil.move('runs/gone', 'runs/live')")
    nb.until("() => !document.querySelector('.mc-note').textContent.includes('is gone')")
    nb.kernel("curves.close()")
    assert nb.kernel("print(curves._clock.thread.is_alive())") == "False" and not nb.errors


@pytest.fixture(scope="module")
def past(module_notebook):
    "A notebook with two widgets: a long run of a hostile name, and two runs overlaid."
    return module_notebook(PAST + f"past({HOSTILE!r}, 60_000, 1)\npast('baseline', 4000, 1)\npast('lower_lr', 6000, 0.6, 1)",
        f"from medlab.widgets.curves import Curves\ncurves = Curves('runs/' + {HOSTILE!r})\ncurves", "both = Curves(['runs/baseline', 'runs/lower_lr'], smooth=0.9)\nboth")


def test_zoom_marks_themes_and_hostile_names(past):
    nb = past
    nb.page.locator(".medlab-curves").first.scroll_into_view_if_needed()
    wait_updates(nb, 1)
    page = nb.page
    page.evaluate(SPY)
    root = page.locator(".medlab-curves").first
    assert page.evaluate(RED, 0) > 15, "NaN and inf are red marks at the edge"
    assert root.locator(".mc-runs .mc-name").inner_text() == HOSTILE and root.locator("img").count() == 0
    at, w = box(nb, 0), box(nb, 0)["width"] - 62
    page.mouse.move(at["x"] + 52 + 0.5 * w, at["y"] + 60)
    nb.until("() => /NaN/.test(document.querySelector('.mc-legend').textContent) || /skip/.test(document.querySelector('.mc-note').textContent)")
    page.mouse.move(at["x"] + 52 + 0.2 * w, at["y"] + 60)
    nb.until("t => document.querySelector('.mc-note').textContent.includes(t)", arg=HOSTILE)
    nb.until("() => ['lr → 0.0002', 'skip ×3', 'bad_sample'].every(t => window.drawn.includes(t))")
    for dark in (True, False):
        nb.theme(dark)
        nb.until("t => document.querySelector('.medlab-curves').dataset.drawn === t", arg="dark" if dark else "light")
        colour = page.evaluate(BEHIND)
        assert (colour == "rgb(255, 255, 255)") != dark, colour
        assert page.evaluate(RED, 0) > 15
        shot(nb, f"{'dark' if dark else 'light'}.png")

    sent, first = updates(nb), root.get_attribute("data-range")
    assert not first
    drag(nb, 0, 0.30, 0.36)
    nb.until("() => { const r = document.querySelector('.medlab-curves').dataset; return r.range && Number(r.updates) > " + str(sent) + " }")
    a, b = map(float, root.get_attribute("data-range").split())
    assert 17_000 < a < 19_000 and 20_000 < b < 22_400
    nb.wait(f"curves._view.range == [{a}, {b}]")
    drag(nb, 1, 0.4, 0.5)
    nb.wait("curves._view.range[1] - curves._view.range[0] < 500")
    root.locator("canvas").nth(0).focus()
    page.keyboard.press("+")
    nb.wait("curves._view.range[1] - curves._view.range[0] < 250")
    shot(nb, "zoomed.png")
    assert nb.kernel("a, b = curves._view.range\nfound = curves._sources[0].history.view(a, b, 480)['loss']\nprint(found[0])") == "points", "values of single steps, fetched from the directory"
    page.keyboard.press("0")
    nb.wait("curves._view.range is None")
    root.locator(".mc-legend button").nth(0).click()
    assert root.locator(".mc-legend button").nth(0).get_attribute("aria-pressed") == "false"
    root.locator("section.mc-panel .mc-head button").nth(1).click()
    root.locator("input").fill("0.9")
    shot(nb, "smooth.png")
    assert page.evaluate("() => window.hacked") is None and not nb.errors
    saved = nb.save().decode()
    assert "image/png" in saved and len(saved) < 300_000, "a picture for each of two widgets, and no data"


def test_runs_overlaid_are_named_and_toggled(past):
    nb, page = past, past.page
    root = page.locator(".medlab-curves").nth(1)
    root.scroll_into_view_if_needed()
    nb.until("() => Number(document.querySelectorAll('.medlab-curves')[1].dataset.updates) >= 2")
    assert root.locator(".mc-runs .mc-name").all_inner_texts() == ["baseline", "lower_lr"]
    shot(nb, "overlaid.png", 1)
    picture = "() => document.querySelectorAll('.medlab-curves')[1].querySelector('canvas').toDataURL()"
    before = page.evaluate(picture)
    root.locator(".mc-runs button").nth(1).click()
    nb.until(f"old => ({picture})() !== old", arg=before)
    nb.save()
    other = nb.again()
    names = "[...(document.querySelectorAll('.medlab-curves')[1]?.querySelectorAll('.mc-runs .mc-name') ?? [])].map(e => e.innerText).join(' ')"
    other.until(f"() => {names} === 'baseline lower_lr'")  # a second browser shows it with nothing run
    other.page.context.close()
    assert not nb.errors


def test_a_panel_in_which_nothing_was_recorded_says_so_legibly(notebook):
    "No mark is drawn through its words, though the skipped steps are in the middle of the run."
    nb = notebook(PAST, "past('bare', 1000, 1.0)\nfrom medlab.widgets.curves import Curves\nCurves('runs/bare', groups=dict(all=['loss'], none=['absent']))")
    nb.until("() => document.querySelector('.medlab-curves[data-updates][data-drawn]')?.querySelectorAll('canvas').length === 2")
    nb.page.locator(".mc-folded button", has_text="none").click()  # a number that is not there yet; its curve is shown when it is asked for
    amber = """() => { const c = document.querySelectorAll('.medlab-curves canvas')[1], { width, height } = c, d = c.getContext('2d').getImageData(0, 0, width, height).data, rows = new Set(), near = k => Math.abs(k / 4 % width - (width + 52 - 10) / 2) < 40;
        for (let k = 0; k < d.length; k += 4) if (near(k) && d[k] > 150 && d[k + 1] < 170 && d[k + 2] < 110 && d[k + 3] > 100) rows.add(Math.floor(k / 4 / width));
        return [...rows] }"""  # rows of pixels that hold something of the mark's colour, where the words are
    nb.until(f"() => ({amber})().length > 30")
    rows = nb.page.evaluate(amber)
    middle = (8 + 144 - 20) / 2
    assert not [y for y in rows if abs(y - middle) < 7] and min(rows) < middle - 20 and max(rows) > middle + 20, rows
