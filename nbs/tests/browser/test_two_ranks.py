"""A run of two ranks in the lab: steered from the panel, a rank is killed before the eyes, and Start goes on with two."""
import pytest
from test_lab import SLICES, ask, shot

pytestmark = pytest.mark.usefixtures("no_process_stays")

TWO = """import psutil
run = Trainer(recipes.Restoration(**slices), 'runs/two', device='cpu', threads=2, gradient_accumulation_steps=2, save_every=10).start(processes=2, parallel='zero1')
def process(rank):
    "That of a rank."
    launcher = psutil.Process(run.environment["pid"]).parent()
    return next(p for p in launcher.children() if p.environ().get("RANK") == str(rank))"""


def test_two_ranks_are_steered_and_one_is_killed(notebook):
    nb = notebook(SLICES, TWO, "lab = Lab('runs/two')\nlab", size=(1240, 1500))
    nb.until_state("running", seconds=120)
    nb.wait("run.step > 3", 120)
    ask(nb, "norm_eps", "2e-4")
    nb.until_fate("norm_eps", "applied")
    nb.page.locator(".mp-buttons button", has_text="Pause").click()
    nb.until_state("paused")
    changes = "[[(c.state, c.applied_step, c.new, c.verified) for c in Run(p).changes()] for p in ('runs/two', 'runs/two/ranks/1')]"
    nb.kernel(f"from medlab import Run; a, b = {changes}; assert a == b and a[0][0] == 'applied' and a[0][2:] == (dict(norm_eps=2e-4), True), (a, b)")
    nb.kernel("at = run.step; assert Run('runs/two/ranks/1').step == at and (run.environment['ranks'], run.environment['parallel']) == (2, 'zero1')")
    nb.page.locator(".mp-buttons button", has_text="Resume").click()
    nb.wait("run.step > at + 3", 60)
    shot(nb, "ranks.png")
    nb.until("() => document.querySelector('.medlab-panel').innerText.includes('cpu × 2 ranks · fp32')")
    nb.kernel("process(1).kill()")
    nb.until_state("failed")
    nb.until("() => document.querySelector('.medlab-panel').innerText.includes('does not reach the others any more, since rank 1')")
    shot(nb, "rank_killed.png")
    nb.kernel("import time\nwhile __import__('medlab.run.sharing').run.sharing.is_live('runs/two'): time.sleep(0.1)\nat = run.checkpoints()[-1]['step']")
    nb.page.locator(".mp-buttons button", has_text="Start").click()
    nb.until_state("running", seconds=120)
    nb.wait("run.step > at + 3 and len(run.events('resume')) == 2 and run.environment['ranks'] == 2", 120)
    nb.wait("run.events('resume')[-1].text.startswith(f'going on after step {at}')")
    shot(nb, "ranks_again.png")
    nb.page.locator(".mp-buttons button", has_text="Stop").click()
    nb.until_state("stopped")
    assert nb.kernel("print(run.checkpoints()[-1]['step'] == run.step)") == "True" and not nb.errors
