"""A recipe and data of a user's own: what is odd is named with the case, and what is mistaken with the user's line."""
import functools
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from medlab import Recipe, Run, Trainer
from medlab.batches.sampler import ResumableSampler
from medlab.cli.main import _status_of
from medlab.core import RunFailed, UserError
from medlab.step.device import DeviceDecisions
from medlab.step.step import HostDecisions
from medlab.train import trainer as train


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


class Typed:
    "A label, of another dtype where the test says."
    def __init__(self, odd): self.odd = odd
    def __call__(self, i): return dict(label=torch.ones(1, dtype=torch.float64 if i in self.odd else torch.float32))


def weighed(model, batch): return dict(loss=(model(batch["x"].mean(2)) - batch["label"]).square().mean(1))


@pytest.mark.parametrize("workers", (0, 1))
@pytest.mark.parametrize("place", (0, 1))
def test_one_case_of_another_dtype_is_left_out_and_named(tmp_path, workers, place):
    "Planted: a float64 label, first or second in its batch, which torch would stack without a word."
    odd = [b for b, _ in zip(ResumableSampler(40, 2, 0), range(20))][-1][place][0]
    made = recipe(Volumes(more=Typed({odd})), workers=workers)
    made.losses = lambda model, batch: weighed(model, batch) | dict(wide=batch["label"].flatten() * (batch["label"].dtype == torch.float64))
    with Trainer(made, tmp_path / "run", threads=1) as t:
        t.fit(20, progress=False)
        told = t.run.events("bad_sample")
        assert t.run.state == "done" and len(told) == 1 and f"case {odd:02}" in told[0].text and "'label': '(1,) float64'" in told[0].text, told
        assert t.run.metrics("dropped")["dropped"].value[-1] == 1 and not any(t.run.metrics("wide")["wide"].value), "no batch became float64"


def test_a_dataset_of_two_dtypes_ends_the_run_at_the_first_batch(tmp_path):
    with Trainer(recipe(Volumes(more=Typed(set(range(0, 40, 3)))), weighed), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError, match=r"'label' is \(1,\) float\d\d in case .* cast in __getitem__"): t.fit(20, progress=False)
        assert not t.quarantine.samples.marks, "no case is accused"
    with Trainer(recipe(Volumes(more=Typed(set(range(40)))), weighed), tmp_path / "same", threads=1) as t:
        t.fit(20, progress=False)
        assert t.step.optimizer_step == 20 and not t.run.events("bad_sample"), "all float64: nobody is odd"


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


class Classes:
    "A class for each case, of which one does not exist."
    def __init__(self, odd=None): self.odd = odd
    def __call__(self, i): return dict(label=torch.tensor(7 if i == self.odd else i % 2))


def classified(model, batch):
    out = torch.cat([model(batch["x"].mean(2)), torch.zeros(len(batch["x"]), 1)], 1)
    return dict(loss=nn.functional.cross_entropy(out, batch["label"], reduction="none"))


def one_hot(model, batch):
    out = torch.cat([model(batch["x"].mean(2)), torch.zeros(len(batch["x"]), 1)], 1)
    return dict(loss=(out - nn.functional.one_hot(batch["label"], 2)).square().mean(1))


def normalized(model, batch):
    x = nn.functional.batch_norm(batch["x"].mean(2) + torch.rand(len(batch["x"]), 1), None, None, training=True)
    return dict(loss=model(x).flatten() + torch.gather(torch.zeros(len(x), 2), 1, batch["label"][:, None]).flatten())


@pytest.mark.parametrize("decisions", (HostDecisions, DeviceDecisions))
@pytest.mark.parametrize("losses, kind", ((classified, IndexError), (one_hot, RuntimeError), (normalized, RuntimeError)))
def test_a_label_out_of_range_is_said_with_the_case(tmp_path, capsys, monkeypatch, decisions, losses, kind):
    "Planted: one label without a class, in the last batch of an epoch; the user's type and line stay."
    monkeypatch.setattr(train, "decisions_for", lambda *args: decisions)
    odd, mate = (i for i, _ in [b for b, _ in zip(ResumableSampler(40, 2, 0), range(20))][-1])
    with Trainer(recipe(Volumes(more=Classes(odd)), losses), tmp_path / "run", threads=1, precision="fp32") as t:
        with pytest.raises(kind) as e: t.fit(30, progress=False)
        assert t.iteration == 19 and t.run.state == "failed"
        text = t.run.events("error")[0].text
        assert text.startswith(f"{kind.__name__}: ") and f"step 20: case {odd:02} raises it alone, and case {mate:02} does not" in text, text
        assert f"in {losses.__name__}: " in text.splitlines()[-1], "the user's line"
        assert len(t.run.metrics("loss")["loss"].value) == 19, "what was made before is whole"
    assert _status_of(e.value) == 1
    assert f"case {odd:02} raises it alone" in capsys.readouterr().err or sys.version_info < (3, 11)
    with Trainer(recipe(Volumes(more=Classes()), losses), tmp_path / "sound", threads=1, precision="fp32") as t:
        t.fit(30, progress=False)
        assert t.run.state == "done" and not t.run.events("error"), "a clean one does not trip"


def test_a_mistake_late_in_a_run_names_the_batch_and_asks_for_the_code(tmp_path):
    def late(model, batch):
        if t.iteration == 3: batch["labl"]
        return classified(model, batch)
    for size, told in ((2, "each sample of the micro-batch raises it alone (case "), (1, "the micro-batch was case ")):
        with Trainer(recipe(Volumes(more=Classes()), late, batch_size=size), tmp_path / f"run{size}", threads=1) as t:
            with pytest.raises(KeyError): t.fit(5, progress=False)
            assert f"KeyError: 'labl'\nstep 4: {told}" in t.run.events("error")[0].text


def test_a_mistake_in_losses_that_medlab_refuses_shows_the_line_too(tmp_path, capsys):
    def mistaken(model, batch):
        raise UserError("no such contrast")
    with Trainer(recipe(losses=mistaken), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError) as e: t.fit(5, progress=False)
    assert _status_of(e.value) == 2
    assert capsys.readouterr().err.rstrip().endswith("in mistaken: raise UserError(\"no such contrast\")")
    assert Run(tmp_path / "run").state == "failed"


def test_what_loading_processes_cannot_be_sent_is_named_before_anything_is_written(tmp_path):
    "Planted: a lambda, a closure, a local class, an open file. Without processes each of them loads, and so do functions of a module with them."
    def closure(i): return {}

    class Local(Volumes): "A class that no other process finds."

    within = Volumes(lambda i: 4)
    within.parts = [dict(keep=four), dict(keep=functools.partial(max, key=lambda i: -i))]
    with open(__file__, encoding="utf-8") as file:
        opened = Volumes()
        opened.file = file
        for data, words in ((Volumes(lambda i: 4), "dataset.side is a lambda (test_own_data.py, line "), (Volumes(more=closure), "dataset.more is the function closure, made within another (test_own_data.py, line "),
                (Local(), "dataset is of the class Local, made within a function"), (opened, "dataset.file is a TextIOWrapper"), ([dict(x=torch.ones(1, 4), f=four), dict(f=lambda: 0)], "dataset[1]['f'] is a lambda")):
            with pytest.raises(UserError, match="cannot be pickled.*workers=2.*workers=0") as e: Trainer(recipe(data, workers=2), tmp_path / "run", threads=1)
            assert str(e.value).startswith(words) and not (tmp_path / "run").exists(), str(e.value)
    within.side = four
    with pytest.raises(UserError, match=r"dataset.parts\[1\]\['keep'\].keywords\['key'\] is a lambda.*the top of a module"): Trainer(recipe(within, workers=2), tmp_path / "run", threads=1)
    with Trainer(recipe(Volumes(lambda i: 4)), tmp_path / "none", threads=1) as t: assert t.fit(2, progress=False).iteration == 2
    with Trainer(recipe(Volumes(functools.partial(four)), workers=1), tmp_path / "module", threads=1) as t: assert t.fit(2, progress=False).iteration == 2


class Nested:
    "Holds a recipe."
    @dataclass
    class Held(Mine):
        "A recipe with a field of any kind."
        keep: object = None


def test_a_field_that_no_run_can_store_is_named(tmp_path):
    "Planted: a function, a tensor, a lock in a field of the recipe. What JSON has words for is stored."
    for value, words in ((lambda i: 4, "Held.keep=<function "), (torch.ones(2), "Held.keep=tensor"), ({1}, "Held.keep={1}"), (threading.Lock(), "fields of Held")):
        with pytest.raises(UserError, match=f"{words}.*cannot be stored with the run.*numbers, texts.*in a method"): Trainer(Nested.Held(keep=value), tmp_path / "run", threads=1)
        assert not (tmp_path / "run").exists()
    with Trainer(Nested.Held(keep=[1, dict(a=None)]), tmp_path / "run", threads=1) as t: assert t.run.meta["recipe"][2]["keep"] == [1, dict(a=None)]
    with Trainer(Nested.Held(keep=tmp_path), tmp_path / "path", threads=1) as t: assert t.fit(1, progress=False).run.meta["recipe"][2]["keep"] == str(tmp_path)
    with Trainer(Nested.Held(keep=str(tmp_path)), tmp_path / "path", resume=True, threads=1) as t: assert not t.run.events("config")


def test_what_another_process_cannot_build_is_refused_before_the_trainer_is_closed(tmp_path, monkeypatch):
    "Planted: a class made within a function. One within a class is found, and a lambda in its data is made anew there."
    @dataclass
    class Local(Mine): "No other process finds it."

    with Trainer(Local(), tmp_path / "local", threads=1) as t:
        t.fit(1, progress=False)
        with pytest.raises(UserError, match="Local was defined within a function, where another process cannot find it; put the class at the top of a module"): t.start(process=True)
        assert t.fit(1, progress=False).iteration == 2, "nothing was closed"
    monkeypatch.setattr(Nested.Held, "data", Volumes(lambda i: 4))
    t = Trainer(Nested.Held(), tmp_path / "held", threads=1, device="cpu")
    assert t.start(process=True, until=2).path == tmp_path / "held" and t.wait(120) and Run(tmp_path / "held").step == 2
