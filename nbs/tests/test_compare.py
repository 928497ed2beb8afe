"""Runs beside one another, and a run made again from its notebook or its configuration: to the bit, or with a word on why not."""
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import nibabel as nib
import pytest
import torch

from medlab import Run, Trainer, faults, recipes
from medlab.cli.main import main
from medlab.compare.phantoms import write_run
from medlab.contracts.listener import SetKnobs
from medlab.core import UserError
from medlab.phantoms import write_brats
from medlab.rebuild.checks import weights_hash
from medlab.recipes.origin import named_class
from medlab.run.checkpoint import newest_state

SMALL = dict(device="cpu", threads=1, val_share=0.0)


OWN = '''from dataclasses import dataclass
import torch
from medlab import Knobs, Real, Recipe

@dataclass
class Mine(Recipe):
    "A line."
    width: int = 3  # of the line

    class Knobs(Knobs):
        weight = Real(1.0, 0, 9, help="of the loss")

    def setup(self, split=None): return self.divide([f"p{i}" for i in range(8)], split)
    def dataset(self): return [dict(case=n, x=torch.full((1, self.width), float(i))) for i, n in enumerate(self.split.train)]
    def build_model(self): return torch.nn.Linear(self.width, 1)
    def score(self, model, name): return dict(error=model(torch.full((1, self.width), 2.0)).square().item())
    def losses(self, model, batch): return dict(loss=self.knobs.weight * model(batch["x"]).square().flatten(1).mean(1))
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    "The file of a recipe of somebody's own."
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / ("mine_" + re.sub(r"\W", "_", tmp_path.name) + ".py")
    file.write_text(OWN)
    return file


@pytest.fixture
def mine(own): "Its class."; return named_class(f"{own}:Mine")


def trained(path, recipe, steps=6, before=lambda trainer: None, **knobs):
    "A run of a tiny network; the hash of its last weights."
    with Trainer(recipe, path, **SMALL | dict(precision="fp32") | knobs) as trainer:
        before(trainer)
        trainer.fit(steps, progress=False)
        return weights_hash(trainer.model.state_dict())


def final(path):
    "The hash of the weights in the newest checkpoint of a run."
    return weights_hash(newest_state(path)[0]["model"])


def cells(file):
    "Sources of the code cells of a notebook, which has to be a valid one."
    nb = nbformat.read(file, as_version=4)
    nbformat.validate(nb)
    return [c.source for c in nb.cells if c.cell_type == "code"]


def executed(file, where):
    "Execute a notebook's cells one after the other; what is said of the weights."
    where.mkdir(exist_ok=True)
    space, here = {}, os.getcwd()
    os.chdir(where)
    try:
        for code in cells(file): exec(re.sub(r"^(same_weights|same_data)\(", r"said_\1 = \1(", code, flags=re.M), space)
    finally: os.chdir(here)
    return space["said_same_weights"]


def rebuilt(run, tmp_path, **options):
    "Write the notebook of a run, execute it, and find the hash of its last weights, and what it says of them."
    said = executed(Run(run).notebook(tmp_path / "again.ipynb", **options), tmp_path / "here")
    return final(tmp_path / "here/runs" / f"{Path(run).name}-again"), said


def two_changes(trainer):
    "Ask for two changes on the way."
    trainer.set(at=3, lr=5e-4)
    trainer.set(at=5, source="panel", clip_norm=0.5, ema=0.9)


def test_a_notebook_gives_the_last_weights_to_the_bit(mine, tmp_path):
    "In a kernel of its own: two changes on the way, and a run that was left and gone on with between them."
    run = tmp_path / "first"
    trained(run, mine(), 4, two_changes)
    with Trainer.open(run, device="cpu", threads=1) as trainer:
        trainer.fit(until=7, progress=False)
        expected = weights_hash(trainer.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = Run(run).notebook(tmp_path / "again.ipynb")
    code = "import sys, nbclient, nbformat; nb = nbformat.read(sys.argv[1], 4); nbclient.NotebookClient(nb, timeout=200, kernel_name='python3').execute(); nbformat.write(nb, sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, file], cwd=tmp_path, check=True, timeout=250)
    again = tmp_path / "runs/first-again"
    assert final(again) == expected
    text = file.read_text()
    assert "the weights after step 7 are those of the run, to the bit" in text and "image/png" in text
    assert "first-again is identical to first to the bit, in loss and grad_norm of 7 common steps" in text
    assert [(c.applied_step, c.new) for c in Run(again).changes()] == [(3, dict(lr=5e-4)), (5, dict(clip_norm=0.5, ema=0.9))]


@pytest.mark.parametrize("name, knobs", [("restoration", dict(precision="bf16", gradient_accumulation_steps=2, schedule="cosine", horizon=6, warmup=2)),
    ("segmentation", dict(precision="fp16", ema=0.9, weight_decay=0.1))])
def test_other_settings_come_out_the_same(tmp_path, name, knobs):
    cls = dict(restoration=recipes.Restoration, segmentation=recipes.Segmentation)[name]
    expected = trained(tmp_path / "first", cls(**cls.tiny | dict(seed=3)), 5, lambda t: t.set(at=3, lr=2e-4), **knobs)
    found, said = rebuilt(tmp_path / "first", tmp_path)
    assert found == expected and "to the bit" in said


def test_what_differs_is_told(mine, tmp_path):
    "The planted fault of the check: one change less, and the weights are others."
    expected = trained(tmp_path / "first", mine(), before=two_changes)
    file = Run(tmp_path / "first").notebook(tmp_path / "again.ipynb")
    text = file.read_text()
    file.write_text(text.replace("trainer.set(at=3, lr=0.0005)", "pass"))
    assert file.read_text() != text
    with pytest.warns(UserWarning, match="not those of the run"): said = executed(file, tmp_path / "here")
    assert "are not those of the run" in said and final(tmp_path / "here/runs/first-again") != expected
    parted = str(Run.compare(tmp_path / "first", tmp_path / "here/runs/first-again"))
    assert "identical to first to the bit before step 4" in parted, "the gradient of step 3 is the same, its update is not"


@pytest.mark.parametrize("error,known", [(KeyboardInterrupt, 4), (ZeroDivisionError, 5)])
def test_a_run_that_failed_is_checked_where_its_weights_are_known(mine, tmp_path, error, known):
    "It broke off after step 5; an interrupt at once leaves the checkpoint of step 4, a mistake saves what was learned."
    class End:
        def after_step(self, result, batch):
            if result.iteration == 5: raise error("planted")
    with Trainer(mine(), tmp_path / "first", **SMALL, save_every=2) as trainer:
        trainer.listeners.append(End())
        with pytest.raises(error): trainer.fit(8, progress=False)
    assert Run(tmp_path / "first").state == "failed" and Run(tmp_path / "first").step == 5
    with pytest.warns(UserWarning, match="the run failed after step 5"): file = Run(tmp_path / "first").notebook(tmp_path / "again.ipynb")
    fits = [c.split("\n")[0] for c in cells(file) if "trainer.fit" in c]
    assert fits == {4: ["trainer.fit(until=4, progress=False)", "try: trainer.fit(until=5, progress=False)"], 5: ["trainer.fit(until=5, progress=False)"]}[known]
    assert f"after step {known} are those of the run, to the bit" in executed(file, tmp_path / "here")
    assert "first failed at step 5" in str(Run.compare(tmp_path / "first", tmp_path / "here/runs/first-again"))


def test_a_recipe_of_ones_own_is_found_by_its_file(own, mine, tmp_path):
    expected = trained(tmp_path / "first", mine(width=4), 5, lambda t: t.set(at=2, weight=2.0))
    found, said = rebuilt(tmp_path / "first", tmp_path)
    assert found == expected and "to the bit" in said and "width=4,  # of the line" in (tmp_path / "again.ipynb").read_text()
    own.write_text(OWN.replace("A line.", "Another line."))
    with pytest.warns(UserWarning, match="is not the source"): Run(tmp_path / "first").notebook(tmp_path / "changed.ipynb")


def test_a_configuration_gives_the_run_on_the_command_line(own, mine, tmp_path):
    "What is written is read, and gives the same weights; a run without changes needs nothing else."
    expected = trained(tmp_path / "first", mine(width=4), 5, lr=3e-3, weight=2.0)
    file = Run(tmp_path / "first").config(tmp_path / "f.yml")
    assert main(["train", f"{own}:Mine", "--config", str(file), "--device", "cpu", "--run", str(tmp_path / "again")]) == 0
    assert final(tmp_path / "again") == expected
    a, b = Run(tmp_path / "first").meta, Run(tmp_path / "again").meta
    assert a["recipe"][2] == b["recipe"][2] and a["knobs"] == b["knobs"] and "nothing differs" in str(Run.compare(tmp_path / "first", tmp_path / "again"))


def test_a_rollback_is_told(mine, tmp_path):
    "In the notebook, and as a warning."
    with Trainer(mine(), tmp_path / "first", **SMALL, save_every=2) as trainer:
        trainer.fit(4, progress=False)
        trainer.restore(2)
        trainer.fit(until=5, progress=False)
    with pytest.warns(UserWarning, match="step 2: the run went back to a checkpoint"): file = Run(tmp_path / "first").notebook(tmp_path / "again.ipynb")
    assert "**This run will not, or may not, come out the same:**" in file.read_text()


def test_memory_that_ran_out_is_told_and_its_parts_are_asked_for(mine, tmp_path):
    "The step that was made again in parts is made in parts from the start, which gives the same bits."
    with Trainer(mine(), tmp_path / "first", **SMALL) as trainer, faults.plant(trainer, faults.out_of_memory(at=3)):
        trainer.fit(6, progress=False)
    assert [(c.source, c.applied_step) for c in Run(tmp_path / "first").changes()] == [("oom", 3)]
    with pytest.warns(UserWarning, match="step 3: memory ran out"): found, said = rebuilt(tmp_path / "first", tmp_path)
    assert found == final(tmp_path / "first") and "to the bit" in said


def test_what_a_listener_asked_for_is_asked_for_again(mine, tmp_path):
    "The notebook has no such listener, and knows its change from the log."
    class Cut:
        def after_step(self, result, batch): return [SetKnobs(dict(lr=1e-4))] if result.iteration == 2 else None
    with Trainer(mine(), tmp_path / "first", **SMALL) as trainer:
        trainer.listeners.append(Cut())
        trainer.fit(5, progress=False)
    found, said = rebuilt(tmp_path / "first", tmp_path)
    assert found == final(tmp_path / "first") and "to the bit" in said and "(guard)" in (tmp_path / "again.ipynb").read_text()


def test_files_are_checked_and_another_voxel_is_told(tmp_path):
    "The data check stands in the notebook; one scan that was written anew under its name makes the run another."
    write_brats(tmp_path / "files", range(8), size=(16, 16, 16))
    small = recipes.FastDDPM(**recipes.FastDDPM.tiny | dict(data_root=str(tmp_path / "files")))
    expected = trained(tmp_path / "first", small, 3, lambda t: t.set(at=2, lr=1e-4))
    found, said = rebuilt(tmp_path / "first", tmp_path)
    assert found == expected and "to the bit" in said and "recipe.preflight()" in cells(tmp_path / "again.ipynb")
    for scan in (tmp_path / "files").glob("*/*t1n*"): nib.save(nib.Nifti1Image(nib.load(scan).get_fdata(dtype="float32") + 1, nib.load(scan).affine), scan)
    with pytest.warns(UserWarning) as told: assert "are not those" in executed(tmp_path / "again.ipynb", tmp_path / "later")
    assert any("the voxels of some case are others" in str(w.message) for w in told)


def test_hostile_runs_write_no_code(tmp_path):
    "What a run directory says of itself stays in quotes and comments, or is refused."
    trained(tmp_path / "first", recipes.Segmentation(**recipes.Segmentation.tiny), 1)
    evil = "x'); import os; os.abort() #\n\"\"\"\nos.abort()"
    meta = Run(tmp_path / "first").meta
    stored = meta["recipe"][2] | dict(data_root=evil)
    run = write_run(tmp_path / f"evil{os.sep}a\nimport os; os.abort()", [(1, dict(loss=1.0))], meta=dict(recipe=[*meta["recipe"][:2], stored], knobs=meta["knobs"], values=meta["knobs"]),
        changes=[(1, dict(lr=(1e-3, 1e-4)), evil)])
    run._db.execute("UPDATE changes SET requested=new")
    with pytest.warns(UserWarning, match="no whole checkpoint"): file = run.notebook(tmp_path / "evil.ipynb")
    for code in cells(file): assert not any("abort" in line and not line.lstrip().startswith(("data_root=", "trainer.set(", "trainer = ", "original", "same_data")) for line in code.split("\n")), code
    import ast
    names = {n.id for code in cells(file) for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
    assert "os" not in names
    with pytest.raises(UserError, match="unknown knob of the run"):
        write_run(tmp_path / "knob", [(1, dict(loss=1.0))], meta=dict(recipe=[*meta["recipe"]], knobs={"a=1, **exit()": 1}, values={})).notebook(tmp_path / "x.ipynb")
    with pytest.raises(UserError): write_run(tmp_path / "field", [(1, dict(loss=1.0))], meta=dict(recipe=[*meta["recipe"][:2], {"a=1": 2}])).notebook(tmp_path / "x.ipynb")


def test_runs_are_compared_while_one_of_them_trains(mine, tmp_path):
    trained(tmp_path / "a", mine(), 30)
    with Trainer(mine(seed=1), tmp_path / "b", **SMALL) as trainer:
        trainer.start(20000)
        try:
            for _ in range(5):
                made = Run.compare(tmp_path / "a", tmp_path / "b")
                assert made._repr_html_() and len(made.overview.rows) == 2
        finally: trainer.stop(); trainer.wait(60)
    ended = Run.compare(tmp_path / "a", tmp_path / "b", by="samples")
    assert ended.places and ended.groups.rows[0]["seeds"] == 2 and ended.places[-1] == 60


def test_json_of_the_notebook_is_the_same_each_time(mine, tmp_path):
    trained(tmp_path / "first", mine(), 2)
    made = [json.loads(Run(tmp_path / "first").notebook(tmp_path / f"{i}.ipynb").read_text()) for i in (0, 1)]
    assert made[0] == made[1] and torch.__version__ in "".join(made[0]["cells"][0]["source"])
