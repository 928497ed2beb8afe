"""A fix is proved from the panel while the run trains: arms arrive, a badge says what came of it, keep switches it on; a page that is
loaded again and a kernel that is started again show the same."""
import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_process_stays")
SMALL = "from medlab import Lab, Run, Trainer, recipes\nR = recipes.Restoration\nsmall = R(**{**R.tiny, 'image_size': (16, 16), 'blocks': (1,)})"
TRAIN = "trainer = Trainer(small, 'runs/first', device='cpu', threads=1, lr=1e-7, val_share=0.0)\ntrainer.fit(12, progress=False)\ntrainer.start()"
LAB = "lab = Lab('runs/first', share=0, stale_after=10**6)\nlab"
pytestmark = pytest.mark.timeout(900)  # processes that begin, pages that are loaded again
FIX = "[data-fix=lower_lr]"  # sets 2e-4, which is more than this run has: with it something is learned
LABEL = "() => document.querySelector('[data-fix=lower_lr]')?.dataset.proof ?? ''"


def shot(nb, name, fix=FIX):
    "A picture of the page, where SHOTS says so."
    if not os.environ.get("SHOTS"): return
    nb.page.locator(fix).first.evaluate("e => e.scrollIntoView({ block: 'center' })")
    nb.page.mouse.move(5, 5)
    nb.page.wait_for_timeout(400)
    nb.page.screenshot(path=Path(os.environ["SHOTS"]) / name)


def both(nb, name):
    "The same in both themes."
    if not os.environ.get("SHOTS"): return
    for dark in (True, False):
        nb.theme(dark)
        shot(nb, f"{name}_{'dark' if dark else 'light'}.png")


def until_label(nb, *words, seconds=120):
    "Wait until the badge of the fix begins with one of these."
    nb.until(f"words => words.some(w => ({LABEL})().startsWith(w))", list(words), seconds)


def begin(nb, fix=FIX, steps="4", seeds="8"):
    "Fill in the form of a fix, and start its proof."
    row = nb.page.locator(fix)
    row.locator(".mp-prove").click()
    row.locator("input[name=steps]").fill(steps)
    row.locator("input[name=seeds]").fill(seeds)
    row.locator("input[name=scores]").uncheck()
    nb.until("f => document.querySelector(`${f} .mp-cost`).textContent.includes('arms of 4 steps')", fix)
    return row


def test_prove_watch_keep(notebook):
    nb = notebook(SMALL, TRAIN, LAB, size=(1240, 1200))
    nb.until_state("running")
    row = begin(nb)
    both(nb, "form")
    at = int(nb.kernel("print(trainer.iteration)"))
    row.locator(".mp-form .mp-main").click()
    until_label(nb, "running")
    nb.until(f"() => /^running [1-9]\\d* of 6–32$/.test(({LABEL})())", seconds=120)
    nb.until("() => (document.querySelector('.mc-arms').dataset.arms || '').split(' ').length === 2")  # off and on, on view by themselves
    both(nb, "running")
    until_label(nb, "helps")
    assert int(nb.kernel("print(trainer.iteration)")) > at and nb.kernel("print(trainer.worker.alive)") == "True"  # it trained on
    note = row.locator(".mp-rests").inner_text()
    assert "loss −" in note and "pairs · step" in note and "20" in note, note
    assert row.locator(".mp-proof").get_attribute("data-old") == "false"
    nb.page.locator(".mc-arms button").click()  # the steps of the arms
    nb.until("() => !!document.querySelector('.medlab-curves').dataset.range")
    assert nb.page.locator(".mc-arm").count() == 2 and "arms with lower_lr" in nb.page.locator(".mc-arm").nth(1).inner_text()
    both(nb, "helps")
    nb.page.locator(".mc-arms select").select_option("")
    nb.until("() => !document.querySelector('.mc-arm') && !document.querySelector('.medlab-curves').dataset.range")
    nb.page.locator(".mc-arms select").select_option("001-lower_lr")  # chosen, they are zoomed to
    nb.until("() => document.querySelectorAll('.mc-arm').length === 2 && !!document.querySelector('.medlab-curves').dataset.range")
    row.locator(".mp-proof button", has_text="keep").click()
    nb.until("() => document.querySelector('[data-fix=lower_lr]').dataset.state === 'on'", seconds=60)
    nb.until("() => document.querySelector('[data-fix=lower_lr] .mp-rests').textContent.includes('kept at step')")
    nb.wait("trainer.knobs.lr == 2e-4")
    change = json.loads(nb.kernel("c = trainer.run.changes()[-1]; print(__import__('json').dumps([c.source, c.state, c.verified, c.new]))"))
    assert change[0].startswith("proof 001-lower_lr: ") and change[1:] == ["applied", True, dict(lr=2e-4)]
    nb.until("() => document.querySelector('.mp-log').innerText.includes('(proof 001-lower_lr: ')")
    assert "proof 001-lower_lr, from step" in nb.page.locator(".mp-log").inner_text()
    both(nb, "kept")
    assert row.locator(".mp-proof").get_attribute("data-old") == "true" and not row.locator(".mp-prove").is_visible()
    nb.save()
    nb.page.reload()
    nb.until_state("running")
    until_label(nb, "helps")
    assert "kept at step" in nb.page.locator(f"{FIX} .mp-rests").inner_text()
    nb.kernel("trainer.stop(); trainer.wait(); lab.close(); trainer.close()")
    assert not nb.errors, nb.errors


def test_a_proof_outlives_its_kernel(notebook):
    nb = notebook(SMALL, "run = Trainer(small, 'runs/first', device='cpu', threads=1, lr=1e-7, val_share=0.0).start(process=True)", LAB, size=(1240, 1200))
    nb.until_state("running", seconds=120)
    nb.wait("run.step > 4", 60)
    begin(nb, seeds="24").locator(".mp-form .mp-main").click()
    until_label(nb, "running")
    nb.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    nb.until("() => document.querySelector('.medlab-panel')?.dataset.dead === 'true'")
    nb.kernel("from medlab import Lab, Run; run = Run('runs/first'); assert 'small' not in globals()")
    nb.page.evaluate("() => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = 2; window.jupyterapp.commands.execute('notebook:run-cell') }")
    nb.until_state("running")
    until_label(nb, "running", "helps")  # its progress, or already its end
    until_label(nb, "helps", seconds=180)
    other = "[data-fix=clip_norm]"
    begin(nb, other, seeds="24").locator(".mp-form .mp-main").click()
    nb.until("() => document.querySelector('[data-fix=clip_norm]').dataset.proof.startsWith('running')", seconds=120)
    nb.page.locator(f"{other} .mp-proof button", has_text="stop").click()
    nb.until("() => /^(stopped|identical|no effect|undecided|helps|harms)/.test(document.querySelector('[data-fix=clip_norm]').dataset.proof)", seconds=120)
    shot(nb, "stopped.png", other)
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    assert not nb.errors, nb.errors


def test_what_cannot_be_proved_is_said(notebook):
    own = "class Own(R): 'Of this notebook.'\n\ntrainer = Trainer(Own(**{**R.tiny, 'image_size': (16, 16), 'blocks': (1,)}), 'runs/own', device='cpu', threads=1, val_share=0.0)\ntrainer.fit(3, progress=False)"
    nb = notebook(SMALL, own, "lab = Lab(trainer, share=0)\nlab", size=(900, 1000))
    nb.until_state("stopped", "done")
    row = begin(nb)
    row.locator("input[name=seeds]").fill("2")
    nb.until("() => document.querySelector('[data-fix=lower_lr] .mp-cost').textContent.includes('seeds=2 must be an integer from 3')")
    shot(nb, "refused_form.png")
    row.locator("input[name=seeds]").fill("8")
    row.locator(".mp-form .mp-main").click()
    nb.until("() => document.querySelector('[data-fix=lower_lr] .mp-refusal').innerText.includes('was defined in a notebook')")
    assert "process=False" in row.locator(".mp-refusal").inner_text() and nb.kernel("print(len(trainer.run.proofs))") == "0"
    both(nb, "refused")
    row.locator(".mp-refusal button").click()
    nb.until("() => document.querySelector('[data-fix=lower_lr] .mp-refusal').hidden")
    nb.kernel("lab.close(); trainer.close()")
    assert not nb.errors, nb.errors
