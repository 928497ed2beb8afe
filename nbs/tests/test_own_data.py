"""A recipe and data of a user's own: what is odd is named with the case, and what is mistaken with the user's line."""
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from medlab import Recipe, Run, Trainer
from medlab.batches.sampler import ResumableSampler
from medlab.cli.main import _status_of
from medlab.core import RunFailed, UserError


ODD = None  # number of the volume that is longer


def four(i): return 4
def various(i): return 4 + i % 3
def one_odd(i): return 5 if i == ODD else 4
def nothing(i): return {}


class Volumes(Dataset):
    "Forty volumes; what the test says is odd."
    def __init__(self, side=four, more=nothing): self.side, self.more = side, more
    def __len__(self): return 40
    def __getitem__(self, i): return dict(case=f"case {i:02}", x=torch.ones(1, self.side(i)), **self.more(i))


class Mine(Recipe):
    "Learns a mean."
    data = Volumes()

    def dataset(self): return self.data
    def build_model(self): return nn.Linear(1, 1)
    def losses(self, model, batch): return dict(loss=(model(batch["x"].mean(2)) - 1).square().mean(1))


def recipe(data=None, losses=None, **kw):
    "Mine with another dataset or other losses."
    made = Mine(**kw)
    if data: made.data = data
    if losses: made.losses = lambda model, batch: losses(model, batch)
    return made


@pytest.mark.parametrize("workers", (0, 1))
def test_volumes_as_they_are_end_the_run_at_the_first_batch(tmp_path, workers):
    with Trainer(recipe(Volumes(various), workers=workers), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError) as e: t.fit(20, progress=False)
        assert t.iteration == 0 and not t.quarantine.samples.marks, "no case is accused"
        assert all(w in str(e.value) for w in ("'x' is (1, ", "in case ", "Volumes (test_own_data.py, line ", "one size",
            "RandSpatialCropd", "ResizeWithPadOrCropd", "batch_size=1", "gradient_accumulation_steps=2"))
        assert "must be of one size" in t.run.events("error")[0].text
    with Trainer(recipe(Volumes(various), workers=workers, batch_size=1), tmp_path / "other", threads=1,
            gradient_accumulation_steps=2) as t:
        t.fit(20, progress=False)
        assert t.step.optimizer_step == 20 and not t.run.events("bad_sample"), "the remedy is one"


def test_one_odd_case_is_left_out_and_named(tmp_path):
    global ODD
    ODD = [b for b, _ in zip(ResumableSampler(40, 2, 0), range(20))][-1][0][0]  # of the last batch of an epoch
    with Trainer(recipe(Volumes(one_odd)), tmp_path / "run", threads=1) as t:
        t.fit(20, progress=False)
        told = t.run.events("bad_sample")
        assert t.run.state == "done" and len(told) == 1 and f"case {ODD:02}" in told[0].text and "(1, 5)" in told[0].text
        assert t.run.metrics("dropped")["dropped"].value[-1] == 1, "its batch-mate was used"


@pytest.mark.parametrize("workers", (0, 1))
@pytest.mark.parametrize("held, told", ((None, "'label', which is None"), ({"a": "b"}, "'label', which is a dict: {'a': 'b'}"),
    ([1, 2], "'label', which is a list")))
def test_what_no_batch_can_hold_is_named_with_its_key(tmp_path, workers, held, told):
    data = Volumes(more=Label(held))
    with Trainer(recipe(data, workers=workers), tmp_path / "run", threads=1) as t:
        with pytest.raises(RunFailed if workers else UserError) as e: t.fit(20, progress=False)
        assert told in str(e.value) and f"(test_own_data.py, line {Volumes.__getitem__.__code__.co_firstlineno}) holds" in str(e.value) and t.iteration < 4
        assert "make a tensor of it, or leave the key out" in str(e.value)


class Label:
    "More of a sample, which another process can be given."
    def __init__(self, held): self.held = held
    def __call__(self, i): return dict(label=self.held)


def test_strings_beside_tensors_and_numbers_are_no_mistake(tmp_path):
    with Trainer(recipe(Volumes(more=lambda i: dict(sex="f", age=61, spacing=(1.0, 1.0, 3.0)))), tmp_path / "run", threads=1) as t:
        t.fit(5, progress=False)
        assert t.step.optimizer_step == 5


def test_a_mistake_in_losses_shows_the_users_line(tmp_path, capsys):
    def mistaken(model, batch):
        return dict(loss=model(batch["imge"]))
    with Trainer(recipe(losses=mistaken), tmp_path / "run", threads=1) as t:
        with pytest.raises(KeyError, match="imge") as e: t.fit(5, progress=False)
        line = f"test_own_data.py, line {mistaken.__code__.co_firstlineno + 1}, in mistaken: return dict(loss=model(batch[\"imge\"]))"
        assert t.run.events("error")[0].text == f"KeyError: 'imge'\n{line}"
        if hasattr(e.value, "__notes__"): assert e.value.__notes__ == [line]
        t.start(5)
        with pytest.raises(KeyError): t.wait()
        assert t.run.events("error")[1].text.endswith(line)
    assert _status_of(e.value) == 1 and capsys.readouterr().err.rstrip().endswith(line), "the last line of what is printed"


def test_a_mistake_in_losses_that_medlab_refuses_shows_the_line_too(tmp_path, capsys):
    def mistaken(model, batch):
        raise UserError("no such contrast")
    with Trainer(recipe(losses=mistaken), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError) as e: t.fit(5, progress=False)
    assert _status_of(e.value) == 2
    assert capsys.readouterr().err.rstrip().endswith("in mistaken: raise UserError(\"no such contrast\")")
    assert Run(tmp_path / "run").state == "failed"
