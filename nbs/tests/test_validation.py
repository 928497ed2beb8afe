"""Validation while training goes on, in real runs: as often as time allows, the best weights kept, failures told."""
import pytest
import torch
from torch import nn

from medlab import Recipe, Run, Trainer
from medlab.cli.main import evaluate
from medlab.core import UserError
from medlab.train import validation


class Line(Recipe):
    "Learns a sum; its score is what the test says."
    metric = "-error"
    scores = [5.0, 3.0, 4.0, 2.0, 9.0]

    def setup(self, split=None): return self.divide([f"case {i:02}" for i in range(12)], split, group=lambda n: n)
    def build_model(self): return nn.Linear(4, 1)

    def dataset(self):
        x = torch.randn(len(self.split.train), 4, generator=torch.Generator().manual_seed(0))
        return [dict(case=n, x=v, y=v.sum(0, keepdim=True)) for n, v in zip(self.split.train, x)]

    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))

    def score(self, model, name):
        done = len([e for e in getattr(self, "seen", []) if e == name])
        self.seen = [*getattr(self, "seen", []), name]
        return dict(error=self.scores[max(0, done - 1) % len(self.scores)])  # the first is tried before step 1


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    with Trainer(Line(), tmp_path / "run", threads=1, val_every_steps=10, val_cases=1, save_every=10, keep=2) as t:
        t.fit(50, progress=False)
        assert t.run.metrics("val_error")["val_error"].value.tolist() == Line.scores
        kept = [(c["step"], c["best"]) for c in t.run.checkpoints()]
        assert (40, True) in kept and kept[-1] == (50, False) and len(kept) == 3, "the two newest, and the best"
        assert t.run.meta["best"]["value"] == 2.0 and t.validation.shown == dict(val_error=9.0)
        best = {k: v.clone() for k, v in t.model.state_dict().items()}
    recipe_of = lambda best: load_model_of(tmp_path / "run", best)
    assert recipe_of(True)[1] == 40 and recipe_of(False)[1] == 50
    assert not torch.equal(recipe_of(True)[0], recipe_of(False)[0]) and torch.equal(recipe_of(False)[0], best["weight"])
    with Trainer(Line(), tmp_path / "run", resume=True, threads=1) as t:
        assert t.validation.best["step"] == 40, "known after a resume"
        t.recipe.scores = [7.0, 1.0]
        t.fit(30, progress=False)
        assert [c["step"] for c in t.run.checkpoints() if c["best"]] == [80], "a better one takes its place"


def load_model_of(path, best):
    "(weight, step) of a run's checkpoint; its recipe is none of medlab's, so its file is read."
    from medlab.run.checkpoint import newest_state
    state, _ = newest_state(path, best=best)
    return state["model"]["weight"], state["progress"]["iteration"]


def test_a_run_of_a_minute_validates_without_being_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "FIRST", 0.05)
    with Trainer(Line(), tmp_path / "run", threads=1, val_cases=1) as t:
        t.fit(300, progress=False)
        n = len(t.run.metrics("val_error")["val_error"].value)
        assert 1 <= n < 300 and t.validation.spent <= 0.05 * t.validation.trained + 2 * t.validation.cost
    monkeypatch.setattr(validation, "FIRST", 1e9)
    with Trainer(Line(), tmp_path / "other", threads=1) as t:
        t.fit(50, progress=False)
        assert "val_error" not in t.run.names() and not [e for e in t.run.events() if e.level != "info"]


@pytest.mark.parametrize("wrong, kind", ((lambda: 1 / 0, ZeroDivisionError), (lambda: 0.5, UserError),
    (lambda: dict(error=torch.ones(4)), UserError), (lambda: dict(error=[1.0]), UserError), (lambda: dict(error="low"), UserError)))
def test_a_score_that_is_wrong_ends_the_run_before_the_first_step(tmp_path, wrong, kind):
    class Wrong(Line):
        def score(self, model, name): return wrong()
    with Trainer(Wrong(), tmp_path / "run", threads=1, val_every_steps=5) as t:
        with pytest.raises(kind): t.fit(10, progress=False)
        assert t.iteration == 0


def test_a_validation_that_fails_later_does_not_end_training(tmp_path):
    class Later(Line):
        def score(self, model, name):
            if self.knobs.val_cases == 2: raise KeyError("a surface that is not there")
            return dict(error=1.0)
    with Trainer(Later(), tmp_path / "run", threads=1, val_every_steps=5, val_cases=1) as t:
        t.set(val_cases=2, at=8)
        t.fit(15, progress=False)
        failed = [e for e in t.run.events("validation") if e.level == "error"]
        assert t.run.state == "done" and len(failed) == 2 and "a surface that is not there" in failed[0].text
        assert "raise KeyError" in failed[0].text, "with the user's line"
    assert Run(tmp_path / "run").step == 15


def test_what_a_user_forgets_is_said(tmp_path):
    "A name alone is a case; a setup that returns nothing, and a folder for the table that is not there."
    with Trainer(Line(), tmp_path / "run", threads=1) as t: assert [r["case"] for r in t.evaluate("case 03").rows] == ["case 03"]

    class Forgot(Line):
        def setup(self, split=None): super().setup(split)
    with pytest.raises(UserError, match=r"Forgot.setup\(\) gave None and must give a dict"): Trainer(Forgot(), tmp_path / "other")
    with pytest.raises(UserError, match="does not exist; make it first"): evaluate([str(tmp_path / "run"), "--csv", str(tmp_path / "no/x.csv")])


def test_a_torn_case_costs_its_own_row_and_no_validation(tmp_path):
    class Torn(Line):
        torn = ()
        def score(self, model, name):
            if name in self.torn: raise EOFError(f"{name} ends early")
            return super().score(model, name)
    with Trainer(Torn(), tmp_path / "run", threads=1, val_every_steps=5) as t:
        t.recipe.torn = first = t.recipe.split.val[:1]
        t.fit(15, progress=False)
        assert t.run.step == 15 and t.run.metrics("val_error")["val_error"].step.tolist() == [5, 10, 15], "it was the first of val"
        assert t.run.metrics("val_left_out")["val_left_out"].value.tolist() == [1.0] * 3
        told = [e for e in t.run.events("validation") if e.level == "warning"]
        assert len(told) == 1 and f"1 of 2 cases could not be scored and are left out of the means: {first[0]}: EOFError" in told[0].text
        assert told[0].data["cases"] == first and "in score: if name in self.torn" in told[0].text, "with the user's line"
        table = t.evaluate()
        assert [(r["case"], r["split"]) for r in table.left_out] == [(first[0], "val")] and len(table.rows) == 3
        assert f"{first[0]}  val    left out: EOFError" in str(table) and "1 of 4 cases could not be scored" in str(table)


def test_a_table_tells_val_from_test(tmp_path):
    with Trainer(Line(), tmp_path / "run", threads=1) as t:
        table, split = t.evaluate(), t.recipe.split
    assert [r["split"] for r in table.rows] == ["val", "val", "test", "test"] and {*table.means} == {"val", "test"}
    values = [r["error"] for r in table.rows]
    assert table.means["val"]["error"] == sum(values[:2]) / 2 and table.means["test"]["error"] == sum(values[2:]) / 2
    assert [r["case"] for r in table.rows] == [*split.val, *split.test] and str(table).count("mean") == 2


def test_all_of_val_and_none_of_test_chooses_the_best(tmp_path):
    with Trainer(Line(), tmp_path / "run", threads=1, val_every_steps=5) as t:
        t.fit(5, progress=False)
        assert {*t.recipe.seen[1:]} == {*t.recipe.split.val} and t.run.meta["best"]["cases"] == 2
        assert "is the best so far, on 2 of 2 cases" in t.run.events("validation")[-1].text

    class NoVal(Line):
        def setup(self, split=None): return self.divide([f"case {i:02}" for i in range(12)], split, val=0.0, group=lambda n: n)
    with Trainer(NoVal(), tmp_path / "other", threads=1, val_every_steps=5) as t:
        t.fit(5, progress=False)
        assert "best" not in t.run.meta and t.run.metrics("val_error")["val_error"].step.tolist() == [5]
        assert "test cases choose no weights" in t.run.events("validation")[-1].text


class Impatient(Line):
    "Interrupted within its second validation."
    def score(self, model, name):
        if len(getattr(self, "seen", [])) > 1: raise KeyboardInterrupt
        return super().score(model, name)


def test_what_was_learned_before_an_interrupted_validation_is_saved(tmp_path):
    with Trainer(Impatient(), tmp_path / "run", threads=1, val_every_steps=10, val_cases=1, save_every=0) as t:
        with pytest.raises(KeyboardInterrupt): t.fit(50, progress=False)
        assert t.run.state == "failed" and t.iteration == 20 and t.run.checkpoints()[-1]["step"] == 20
    with Trainer(Line(), tmp_path / "run", resume=True, threads=1) as t: assert t.iteration == 20
