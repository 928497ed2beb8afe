"""A run of an earlier revision, killed while changes were pending, in the lab of today: what a user sees of it."""
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from medlab import recipes
from medlab.run.older_names import EVENTS, KNOBS

OLD = Path(__file__).parents[1] / "fixtures" / "run_v1"
DRAWN = """() => [...document.querySelectorAll('.medlab-curves .mc-panel:not([hidden])')].map(p => {
    const c = p.querySelector('canvas'), { width, height } = c, d = c.getContext('2d').getImageData(0, 0, width, height).data;
    const share = [...p.querySelectorAll('.mc-swatch')].map(e => {
        const [r, v, b] = getComputedStyle(e).borderTopColor.match(/[0-9]+/g), columns = new Set();
        for (let k = 0; k < d.length; k += 4) if (Math.abs(d[k] - r) + Math.abs(d[k + 1] - v) + Math.abs(d[k + 2] - b) < 24 && d[k + 3] > 200) columns.add(k / 4 % width);
        return columns.size / width });
    return [p.querySelector('.mc-title').textContent, Math.max(...share)] })"""  # share of a panel's width where a curve of it is seen
SPY = """() => { const own = CanvasRenderingContext2D.prototype, { clearRect, fillText } = own; window.marks = new Map();
    own.clearRect = function (...a) { window.marks.set(this.canvas, []); return clearRect.apply(this, a) };
    own.fillText = function (text, ...a) { const t = this.getTransform(); if (t.b < 0) window.marks.get(this.canvas)?.push([t.e + 11 * t.b, t.e, text]); return fillText.call(this, text, ...a) };
    const log = document.querySelector('.medlab-curves .mc-head button'); log.click(); log.click() }"""
MARKS = "() => [...window.marks.values()].filter(m => m.length)"  # of each panel: left and right of every upright text, and the text
BOXES = """() => { const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
    return [...document.querySelectorAll('.medlab-panel, .medlab-curves .mc-panel:not([hidden]), .medlab-viewer')].map(box) }"""
CUT = """() => [...document.querySelectorAll('.medlab-panel *, .medlab-curves .mc-name')].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1
    && !e.matches('pre, input, .mp-switch')).map(e => e.className + ': ' + e.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def old(module_notebook, server):
    "Its lab; a copy of it also holds an event of each kind that has another name now."
    path = shutil.copytree(OLD, server.root / "run_v1")
    db = sqlite3.connect(path / "run.db")
    newest, = db.execute("SELECT max(time) FROM events").fetchone()
    for i, kind in enumerate(EVENTS):
        db.execute("INSERT INTO events(time, step, kind, level, text, data) VALUES(?, 25, ?, 'info', 'of that time', '{}')", (newest + i, kind))
    db.commit()
    db.close()
    nb = module_notebook("from medlab import Lab", "lab = Lab('../run_v1')\nlab", size=(1500, 1900))
    nb.until_state("killed")
    nb.until("() => [...document.querySelectorAll('.medlab-viewer canvas')].filter(c => c.height > 50).length === 3", seconds=60)
    nb.until("() => document.querySelector('.medlab-curves')?.dataset.drawn")
    return nb


def text(nb, selector): return nb.page.locator(selector).first.inner_text()


def test_its_state(old):
    "Killed at step 25 of 35: what happened is said in words, and Start is what can be done."
    assert text(old, ".mp-state") == "killed" and text(old, ".mp-facts").split("\n")[:2] == ["step", "25 / 35"]
    assert "The process ended without a word" in text(old, ".mp-trouble") and "Start goes on from the newest checkpoint" in text(old, ".mp-trouble")
    able = old.page.evaluate("() => [...document.querySelectorAll('.mp-button')].filter(b => b.getAttribute('aria-disabled') === 'false').map(b => b.textContent)")
    assert able == ["Start"] and text(old, ".mc-state") == "killed, step 25"
    assert old.page.locator(".mp-note").is_hidden(), "its knobs can be changed"
    assert "Traceback" not in text(old, ".jp-Notebook") and not old.errors, old.errors


def test_its_knobs_have_the_names_of_today(old):
    rows = old.page.evaluate("() => [...document.querySelectorAll('.mp-row[data-knob]')].map(r => r.dataset.knob)")
    assert set(KNOBS.values()) <= set(rows) and len(rows) == len(set(rows)) > 50
    assert not set(rows) & set(KNOBS) and all(hasattr(recipes.Restoration.Knobs, k) for k in rows)
    value = lambda k: old.page.locator(f".mp-row[data-knob={k}] .mp-number").input_value()
    fate = lambda k: old.page.locator(f".mp-row[data-knob={k}] .mp-fate").text_content()
    assert (value("gradient_accumulation_steps"), fate("gradient_accumulation_steps")) == ("1", "at step 28 · now 3")
    assert (value("escalate_after"), fate("escalate_after")) == ("7", "✓ step 23")
    assert (value("lr"), fate("lr"), fate("activation_checkpointing")) == ("5e-4", "✓ step 24", "✓ step 24")
    assert fate("check_inputs") == "at step 28 · now on"
    fixes = old.page.evaluate("() => [...document.querySelectorAll('.mp-row[data-fix]')].map(r => r.dataset.fix)")
    assert {"check_inputs", "activation_checkpointing"} <= set(fixes) and not set(fixes) & set(KNOBS)


def test_its_events_have_the_words_of_today(old):
    items = old.page.evaluate("() => [...document.querySelectorAll('.mp-item')].map(e => [e.dataset.kind, e.children[1].lastChild.textContent])")
    assert {k for k, _ in items} == {"change", "checkpoint", "diagnosis", "skip", "sqlite", *EVENTS.values()}
    assert ["change", "check_inputs → off, gradient_accumulation_steps → 1 (api) · pending until step 28"] in items
    assert ["change", "escalate_after 5 → 7 (api) · applied, verified"] in items and ["change", "gradient_accumulation_steps 2 → 3 (api) · applied, verified"] in items
    assert len([1 for k, _ in items if k == "change"]) == 10
    named = old.page.evaluate("() => [...document.querySelectorAll('.medlab-panel *')].flatMap(e => [e.title ?? '', e.children.length ? '' : e.textContent])")
    said = [t for t in named if re.search(rf"\b({'|'.join(set(KNOBS) - {'validate'})})\b[^.]*→", t)]
    assert not said, said


def test_its_curves_are_drawn(old):
    drawn = dict(old.page.evaluate(DRAWN))
    assert drawn.keys() >= {"loss", "gradient norm", "learning rate", "loss scale", "throughput", "memory, GB", "validation", "validation, from 0 to 1"}
    assert all(share > 0.2 for share in drawn.values()), drawn
    assert "step 20, predicted in" in old.kernel("print(lab.preview.status.value)")


def test_nothing_lies_over_another_or_is_cut(old):
    boxes = old.page.evaluate(BOXES)
    over = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if min(a[2], b[2]) > max(a[0], b[0]) + 1 and min(a[3], b[3]) > max(a[1], b[1]) + 1]
    assert len(boxes) == 10 and not over, over
    assert not (cut := old.page.evaluate(CUT)), cut
    old.page.evaluate(SPY)
    old.page.add_style_tag(content=".medlab-curves { --medlab-curve-height: 144px !important; --medlab-curve-width: 310px !important }")  # in low panels only the line under the cursor has its words
    old.until(f"() => ({MARKS})().length === 2")
    for marks in map(sorted, old.page.evaluate(MARKS)):
        assert len(marks) > 6 and all(a[1] <= b[0] for a, b in zip(marks, marks[1:])), marks
        assert any(m[2].endswith(" ×2") for m in marks), "of marks that are joined, the number is never cut off"
