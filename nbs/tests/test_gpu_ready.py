"""What a GPU asks of training and prediction, seen without one: torch's calls are replaced, or the stand-in of fake_device is used."""
import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from course import COMMON, STEPS, Case, Regression, Toy, cases, train
from fake_device import CUDA, DeviceTensor, FakeDevice, copies_ahead

from medlab import Trainer, faults, recipes
from medlab.cli.main import main
from medlab.core import UnknownName
from medlab.memory import inference
from medlab.numerics.tf32 import read_tf32, set_tf32
from medlab.recipes import restoration, segmentation
from medlab.run.directory import Run
from medlab.step.device import DeviceDecisions
from medlab.step.step import HostDecisions
from medlab.train import trainer as trainer_module

RESTORATION = dict(recipes.Restoration.tiny, dim=4, refinement=0, image_size=(16, 16))


@pytest.fixture(autouse=True)
def rounding_as_before():
    "TF32 is of the process; the tests leave it as they found it."
    before = read_tf32()
    yield
    set_tf32(before)


@pytest.fixture
def make(tmp_path):
    "Makes a trainer of a tiny recipe."
    with contextlib.ExitStack() as stack:
        def made(run="run", **kw): return stack.enter_context(Trainer(recipes.Restoration(**RESTORATION), tmp_path / run, device="cpu", threads=1, **kw))
        yield made


def test_going_back_reads_the_checkpoint_on_the_host_and_moves_nothing(make, monkeypatch):
    "A run that ran out of memory has no room for a second copy."
    t, places = make(), []
    t.fit(3, progress=False)
    held = lambda: [p.data_ptr() for p in t.model.parameters()] + [v.data_ptr() for s in t.optimizer.state.values() for v in s.values()]
    before, load = held(), torch.load
    t.fit(2, progress=False)
    monkeypatch.setattr(torch, "load", lambda *a, map_location=None, **kw: places.append(str(map_location)) or load(*a, map_location="cpu", **kw))
    monkeypatch.setattr(t.saver, "device", torch.device("cuda", 0))
    t.restore()
    assert places == ["cpu"] and held() == before and len(before) > 10
    monkeypatch.setattr(t.saver, "device", torch.device("cpu"))
    assert t.fit(1, progress=False).iteration == 6


def test_a_run_that_went_back_trains_the_same(make, tmp_path):
    "To the bit, though the moments were copied into place."
    weights = lambda t: torch.cat([p.detach().flatten() for p in t.model.parameters()])
    a, b = make("a", ema=0.9), make("b", ema=0.9)
    a.fit(6, progress=False)
    b.fit(3, progress=False); b.save(); b.fit(2, progress=False); b.restore(3); b.fit(3, progress=False)
    assert torch.equal(weights(a), weights(b)) and all(torch.equal(v, b.step.ema.shadow[k]) for k, v in a.step.ema.shadow.items())


def test_who_hands_a_run_over_keeps_nothing_on_the_device(make, monkeypatch):
    "Before the other process starts."
    t, order = make(ema=0.9).fit(3, progress=False), []
    to = t.system.to
    monkeypatch.setattr(t.system, "to", lambda device: order.append(f"to {device}") or to(device))
    monkeypatch.setattr(trainer_module, "give_back", lambda: order.append(f"emptied, {len(t.optimizer.state)} moments"))
    monkeypatch.setattr(trainer_module, "start_process", lambda *a: order.append("process"))
    run = t.start(process=True, until=9)
    assert order == ["to cpu", "emptied, 0 moments", "process"] and isinstance(run, Run)
    assert all(p.grad is None for p in t.model.parameters()) and t.step.ema.shadow and t.step.batch is None


def test_a_thread_trains_on_the_trainers_gpu(make, monkeypatch):
    "A new thread begins with number 0."
    t, seen = make(), []
    @contextlib.contextmanager
    def current(device):
        seen.append((str(device), threading.current_thread().name)); yield
        seen.append("left")
    monkeypatch.setattr(torch.cuda, "device", current)
    t.device = torch.device("cuda", 1)
    t.start(2); t.wait(60)
    assert seen == [("cuda:1", "medlab-trainer"), "left"]
    t.memory.device = t.device
    t.predict(t.recipe.split.train[0])
    assert seen[2:] == [("cuda:1", "MainThread"), "left"]


def test_tf32_is_off_until_asked_for_and_stands_in_the_facts(make):
    set_tf32(True)
    t = make()
    assert not read_tf32() and t.run.environment["tf32"] is False and t.fixes["exact_fp32"].active
    change = t.set(tf32=True)
    t.fit(2, progress=False)
    assert change.state == "applied" and read_tf32() and not t.fixes["exact_fp32"].active
    other = make("other")
    assert not read_tf32(), "that of another trainer in this process"
    t.fit(1, progress=False)
    assert read_tf32(), "the one that trains"
    other.fit(1, progress=False)
    assert not read_tf32()
    t.fixes["exact_fp32"].on()
    t.fit(1, progress=False)
    assert not read_tf32() and not t.knobs.tf32
    on = make("on", tf32=True)
    assert on.run.environment["tf32"] is True


def test_prediction_takes_the_gpu_and_says_so(make, tmp_path, monkeypatch, capsys):
    t = make().fit(2, progress=False)
    t.close()
    asked = []
    from medlab.cli import main as cli
    from medlab.train import state
    from medlab.data.images import write_image
    write_image(200 * torch.rand(20, 24).numpy(), tmp_path / "a.png")
    monkeypatch.setattr(state, "torch_device", lambda name=None: asked.append(name) or torch.device("cpu"))
    assert cli.main(["predict", str(t.path), str(tmp_path / "a.png"), str(tmp_path / "out.png"), "--sums", "host"]) == 0
    assert asked == [None] and "with the weights of step 2, on cpu" in capsys.readouterr().err
    assert main(["predict", str(t.path), str(tmp_path / "a.png"), str(tmp_path / "out.png"), "--sums", "hots"]) == 2


def test_a_prediction_that_does_not_fit_is_made_in_smaller_tiles(make, tmp_path, monkeypatch, capsys):
    "On a GPU that training holds, too."
    t = make().fit(2, progress=False)
    t.close()
    from medlab.data.images import write_image
    write_image(200 * torch.rand(40, 40).numpy(), tmp_path / "a.png")
    whole, tiles = restoration.restore, []
    def restore(recipe, model, x, tile=None, **kw):
        tiles.append(tile)
        if tile is None or tile > 16: raise torch.OutOfMemoryError("planted")
        return whole(recipe, model, x, tile, **kw)
    monkeypatch.setattr(restoration, "restore", restore)
    assert main(["predict", str(t.path), str(tmp_path / "a.png"), str(tmp_path / "out.png"), "--tile", "32"]) == 0
    assert tiles == [32, 16] and "tried again in tiles of 16" in capsys.readouterr().err


class Sum(torch.nn.Module):
    "A network on the device that tells where its windows are."

    def __init__(self, channels): super().__init__(); self.weight, self.channels, self.seen = torch.nn.Parameter(torch.ones(1)), channels, set()

    def forward(self, x, *_):
        self.seen.add(type(x))
        return (x * self.weight).repeat(1, self.channels, *[1] * (x.ndim - 2))


@pytest.mark.parametrize("kind", ("restoration", "segmentation"))
def test_sums_of_windows_stay_on_the_host_where_they_take_much(kind, monkeypatch):
    "The network's windows go to the device, one by one; smaller tiles then need less of it."
    recipe = SimpleNamespace(image_size=(8, 8), spatial_dims=2, network="restormer") if kind == "restoration" else SimpleNamespace(image_size=(8, 8, 8), network="dynunet", options={}, table=range(3), flips="")
    x = torch.rand(1, 1, 20, 20) if kind == "restoration" else torch.rand(1, 12, 12, 12)
    import monai.inferers
    infer, places = monai.inferers.sliding_window_inference, []
    monkeypatch.setattr(monai.inferers, "sliding_window_inference", lambda x, *a, **kw: places.append((type(x), kw["device"])) or infer(x, *a, **kw))
    def made(model, **kw):
        if kind == "restoration": return restoration.restore(recipe, model, SimpleNamespace(image=x, depth=None), progress=False, **kw)
        return segmentation.probabilities(recipe, model, x, progress=False, **kw)

    model = Sum(3 if kind == "segmentation" else 1)
    expected = made(model)
    assert places == [(torch.Tensor, torch.device("cpu"))]
    places.clear()
    with FakeDevice() as device, torch.no_grad():
        device.place(model)
        for sums, free, on_device in (("host", 40, False), ("device", 0, True), ("auto", 40, True), ("auto", 1e-6, False)):
            monkeypatch.setattr(inference, "gpu_free", lambda device: free)
            model.seen.clear()
            out = made(model, sums=sums)
            assert type(out) is torch.Tensor and torch.equal(out, expected) and model.seen == {DeviceTensor}
            assert places.pop() == ((DeviceTensor, CUDA) if on_device else (torch.Tensor, torch.device("cpu"))), sums
    with pytest.raises(UnknownName, match="place of sums"): made(model, sums="hots")


# samples sent ahead of their step

class Whole(Toy):
    "The course without a shortage of memory, which is met in another way where samples were sent ahead."
    no_memory, planned = (10**9, "forward"), ("unreadable", "no_loss", "no_gradient")


@pytest.mark.parametrize("precision", ("fp32", "fp16"))
def test_a_course_of_faults_changes_stop_and_resume_is_the_same_to_the_bit(tmp_path, precision):
    "Bad cases, quarantine, roll backs, knobs that change what a step is made of: nothing knows of what was sent ahead."
    toy = cases()["toy"]
    case = Case(Whole, toy.fields, toy.knobs, toy.changes)
    a = train(case, tmp_path / "a", 0, precision)
    with copies_ahead(): b = train(case, tmp_path / "b", 0, precision)
    for d in (a, b): d["metrics"] = {k: v["sha256"] for k, v in d["metrics"].items()}
    for part in a: assert a[part] == b[part], part
    assert a["end"] == ["done", STEPS] and len(a["events"]) > 20 and COMMON["save_every"]


@pytest.fixture
def small(tmp_path):
    "Makes trainers of a recipe of milliseconds."
    with contextlib.ExitStack() as stack:
        def made(run, recipe=None, **kw):
            return stack.enter_context(Trainer(recipe or Regression(), tmp_path / run, device="cpu", threads=1, **({} if kw.get("resume") else dict(lr=1e-2)) | kw))
        yield made


def weights(t): return torch.cat([v.double().flatten() for v in t.model.state_dict().values()])


@pytest.mark.parametrize("decisions", (HostDecisions, DeviceDecisions))
def test_the_copy_is_under_way_while_the_step_is_computed(small, monkeypatch, decisions):
    log, finish = [], decisions.finish
    monkeypatch.setattr(trainer_module, "decisions_for", lambda *a: decisions)
    monkeypatch.setattr(decisions, "finish", lambda self, t, n: log.append(len(copy.made)) or finish(self, t, n))
    with copies_ahead():
        t = small("run")
        copy = t.batches.copy
        t.fit(6, progress=False)
        assert log == [2, 3, 4, 5, 6, 7] and t.batches.samples_seen == 6 * 8, "those of the step, and those of the next"
        assert not any(a.sent for a in t.batches.ahead), "the device holds nothing of a run that stopped"
        log.clear()
        t.set(prefetch=False)
        t.fit(3, progress=False)
        assert log == [8, 9, 10] and copy.made[6] == copy.made[7], "copied again when its step began"
    plain = small("plain").fit(9, progress=False)
    assert torch.equal(weights(plain), weights(t)) and plain.step.meanwhile.__name__ == "<lambda>", "nobody reads ahead on a CPU"


def test_what_was_sent_ahead_goes_first_where_memory_runs_out(small):
    "The same step is made again without it, and nothing has to be divided; it stays off in what goes on from there."
    plain = small("plain", save_every=4).fit(12, progress=False)
    with copies_ahead():
        t = small("run", save_every=4)
        finish, left = t.step.decisions.finish, [5]
        def starve(tr, expected):
            if tr.iteration not in left: return finish(tr, expected)
            left.remove(tr.iteration)
            raise faults.OUT_OF_MEMORY["gpu"]()
        t.step.decisions.finish = starve
        t.fit(8, progress=False)
        said = t.run.events("out_of_memory")
        assert len(said) == 1 and "prefetch is off until asked for" in said[0].text and said[0].data["before"] == said[0].data["after"] == 8
        assert [(c.source, c.new, c.applied_step) for c in t.run.changes()] == [("oom", dict(prefetch=False), 6)]
        assert t.knobs.micro_batch is None and not t.knobs.prefetch and not t.batches.ahead
        t.close()
        again = small("run", resume=True)
        assert not again.batches.prefetches
        again.fit(2, progress=False)
        assert not again.batches.ahead
        change = again.set(prefetch=True)
        again.fit(2, progress=False)
        assert change.state == "applied" and len(again.batches.ahead) == 1
    assert torch.equal(weights(plain), weights(again))


def test_a_device_without_room_for_another_batch_is_told_once(small):
    plain = small("plain").fit(8, progress=False)
    with copies_ahead():
        t = small("run").fit(2, progress=False)
        send, t.batches.copy.room = t.batches.copy.send, True
        t.batches.copy.send = lambda batch: send(batch) if t.step.phase == "after" else exec('raise torch.OutOfMemoryError("CUDA out of memory")', dict(torch=torch))
        t.fit(6, progress=False)
        said = t.run.events("out_of_memory")
        assert len(said) == 1 and said[0].data["where"] == "prefetch" and "copied when it begins: prefetch is off" in said[0].text
        assert not t.knobs.prefetch and t.retry.attempted == 8, "the step has nothing to do with it"
    assert torch.equal(weights(plain), weights(t))


def test_a_checkpoint_and_a_rollback_know_nothing_of_what_was_sent_ahead(small):
    plain = small("plain", gradient_accumulation_steps=2).fit(9, progress=False)
    with copies_ahead():
        t = small("run", gradient_accumulation_steps=2).fit(4, progress=False)
        assert t.state.state_dict()["batches"]["samples_seen"] == 64 and len(t.batches.ahead) == 2
        t.fit(3, progress=False)
        t.restore(4)
        assert t.batches.samples_seen == 64 and not t.batches.ahead
        t.fit(2, progress=False)
        t.start(3)
        t.pause()
        t.resume()
        t.wait(20)
    assert torch.equal(weights(plain), weights(t))


class Slow(Regression):
    "Each batch takes 40 ms to read, and no time to compute."

    def dataset(self):
        class Read(torch.utils.data.Dataset):
            def __len__(self): return len(items)
            def __getitem__(self, key):
                time.sleep(0.005)
                return items[key]
        items = super().dataset()
        return Read()

    def prepare(self, batch, seed, step=None):
        time.sleep(0.02)
        return batch


def test_data_time_is_waiting_and_not_work(small):
    "What is read while a step is computed is not waited for; preparing is not waiting."
    first = lambda t: t.run.metrics("data_time")["data_time"].value.tolist()
    plain = first(small("plain", Slow()).fit(6, progress=False))
    with copies_ahead(): ahead = first(small("run", Slow()).fit(6, progress=False))
    assert all(v >= 0.04 for v in plain) and ahead[0] >= 0.04 and max(ahead[1:]) < 0.02, (plain, ahead)
    step = small("other", Slow()).fit(2, progress=False).run.metrics("step_time")["step_time"].value
    assert (step >= 0.06).all()


def test_a_knob_that_changes_how_samples_are_read_holds_for_the_next_step(small):
    class Scaled(Regression):
        factor, seen = 1.0, []
        def dataset(self):
            class Read(list):
                def __getitem__(self, key):
                    item = super().__getitem__(key)
                    return {**item, "x": torch.full((4,), recipe.factor)}
            return Read(super().dataset())
        def prepare(self, batch, seed, step=None):
            self.seen.append(batch["x"][0, 0].item())
            return batch
    recipe = Scaled()
    with copies_ahead():
        t = small("run", recipe).fit(3, progress=False)
        put = t.controls.put
        t.controls.put = lambda *a: setattr(recipe, "factor", 2.0) or put(*a)
        t.set(lr=5e-3)
        t.fit(2, progress=False)
    assert recipe.seen == [1.0] * 3 + [2.0] * 2
