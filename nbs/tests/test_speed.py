"""Switches of speed, turned while every recipe trains: the same weights but for rounding, also over a resume, and said."""
import functools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from medlab import recipes
from medlab.core import UserError
from medlab.run.directory import Run
from medlab.step.device import DeviceDecisions
from medlab.step.kernels import read_implementation
from medlab.step.speed import graphs_of, read_channels_last, read_compile, set_compile
from medlab.step.step import HostDecisions
from medlab.train import bindings, trainer
from medlab.train.trainer import Trainer

ALL = "FastDDPM", "Restoration", "Segmentation"


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    "Networks are traced, forwards and backwards, and not compiled: that takes minutes, and is done in nbs/bench/speed."
    monkeypatch.setattr(bindings, "set_compile", functools.partial(set_compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


def trained(path, name, steps, changes=(), resume=False, **knobs):
    "A tiny recipe after so many steps: (weights, verified changes, events of compilation, the trainer)."
    cls = getattr(recipes, name)
    with Trainer(cls(**{**cls.tiny, "batch_size": 2}), path, resume=resume, threads=1, **knobs) as t:
        for at, change in changes: t.set(at=at, **change)
        t.fit(steps, progress=False)
        weights = torch.cat([p.detach().flatten() for p in t.model.parameters()])
        return weights, [(c.state, c.verified) for c in t.run.changes()], [e for e in t.run.events("compilation")], t


@pytest.mark.parametrize("name", ALL)
def test_channels_last_is_turned_on_and_off_and_resumed(tmp_path, name):
    plain, *_ = trained(tmp_path / "plain", name, 5)
    changes = [(3, dict(channels_last=False)), (4, dict(channels_last=True))]
    _, verified, _, t = trained(tmp_path / "switched", name, 4, changes, channels_last=True)
    assert verified == [("applied", True)] * 2 and read_channels_last(t.model)
    strides = lambda t: [[v.stride() == p.stride() for v in s.values() if torch.is_tensor(v) and v.shape == p.shape]
        for p, s in t.optimizer.state.items()]
    assert all(map(all, strides(t))) and any(strides(t))
    weights, _, _, t = trained(tmp_path / "switched", name, 1, resume=True)
    assert read_channels_last(t.model) and all(map(all, strides(t)))
    assert (weights - plain).abs().max() < 2e-4, "Adam divides differences of rounding by their own size"
    assert (weights - plain).square().mean().sqrt() < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_compile_is_turned_on_and_off(tmp_path, name):
    plain, *_ = trained(tmp_path / "plain", name, 4)
    weights, verified, events, t = trained(tmp_path / "switched", name, 4, [(2, dict(compile="model")), (4, dict(compile="off"))])
    assert verified == [("applied", True)] * 2 and read_compile(t.model) == "off" and graphs_of(t.model) is None
    assert events and events[0].step == 2 and events[0].data["graphs"] >= 1
    assert (weights - plain).abs().max() < 1e-4


def test_a_diagnosis_sees_through_a_compiled_network(tmp_path):
    cls = recipes.Restoration
    with Trainer(cls(**{**cls.tiny, "batch_size": 2}), tmp_path / "run", threads=1, compile="model", drop_looks=4) as t:
        t.fit(1, progress=False)
        name, module = next((n, m) for n, m in t.model.named_modules() if isinstance(m, torch.nn.Conv2d))
        forward = module.forward
        module.forward = lambda x: forward(x) * torch.nan
        torch.compiler.reset()  # so that the fault is traced
        t.fit(1, progress=False)
        found = [e.data.get("module") for e in t.run.events() if e.kind in ("drop", "diagnosis")]
        assert name in found and read_compile(t.model) == "model"


def test_what_cannot_be_compiled_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bindings, "set_compile", functools.partial(set_compile, backend="none such"))
    cls = recipes.Restoration
    with Trainer(cls(**cls.tiny), tmp_path / "run", threads=1) as t:
        change = t.set(compile="model")
        t.fit(2, progress=False)
        assert change.state == "refused" or change.state == "reverted", change
        assert "nothing can be compiled for cpu" in change.reason and t.knobs.compile == "off" == read_compile(t.model)


@pytest.mark.parametrize("forced", (False, True), ids=("host", "device"))
@pytest.mark.parametrize("name", ALL)
def test_the_optimizer_changes_its_implementation_and_is_resumed(tmp_path, monkeypatch, name, forced):
    "To and fro while training runs; on a device the strategy goes with it, and comes back."
    fused = lambda optimizer, replicas=None: DeviceDecisions if read_implementation(optimizer) == "fused" else HostDecisions
    if forced: monkeypatch.setattr(trainer, "decisions_for", fused)
    knob = lambda value: dict(optimizer_implementation=value)
    plain, *_ = trained(tmp_path / "plain", name, 6)
    changes = [(2, knob("foreach")), (3, knob("for-loop")), (5, knob("fused"))]
    _, verified, _, t = trained(tmp_path / "switched", name, 5, changes)
    assert verified == [("applied", True)] * 3 and read_implementation(t.optimizer) == "fused"
    assert type(t.step.decisions) is (DeviceDecisions if forced else HostDecisions)
    weights, _, _, t = trained(tmp_path / "switched", name, 1, resume=True, **knob("foreach"))
    assert read_implementation(t.optimizer) == "foreach" and type(t.step.decisions) is HostDecisions
    assert (weights - plain).abs().max() < 2e-4 and (weights - plain).square().mean().sqrt() < 1e-5
    run = Run(tmp_path / "switched")
    assert run.metrics("loss")["loss"].step.tolist() == [1, 2, 3, 4, 5, 6] and not run.events("external_lr")


def test_an_implementation_that_a_class_has_not_is_refused(tmp_path):
    cls = recipes.Restoration
    with Trainer(cls(**cls.tiny, optimizer="NAdam"), tmp_path / "run", threads=1) as t:
        change = t.set(optimizer_implementation="fused")
        t.fit(1, progress=False)
        assert change.state == "reverted" and "NAdam has no fused implementation" in change.reason
        assert t.knobs.optimizer_implementation == "auto" == read_implementation(t.optimizer)


def test_cuda_graphs_are_refused_without_a_gpu(tmp_path):
    cls = recipes.Restoration
    with Trainer(cls(**cls.tiny), tmp_path / "run", threads=1) as t:
        change = t.set(cuda_graphs=True)
        t.fit(1, progress=False)
        assert change.state == "reverted" and "leave it off" in change.reason and not t.knobs.cuda_graphs
    with pytest.raises(UserError, match="cuda_graphs=True needs a network on a GPU"):
        Trainer(cls(**cls.tiny), tmp_path / "other", threads=1, cuda_graphs=True)
    assert not (tmp_path / "other").exists(), "refused before the directory is touched"


def test_what_cudnn_tries_is_the_knob_of_the_trainer_that_trains(tmp_path):
    "The setting is the process's: each trainer writes its own, and the run's facts say it."
    cls = recipes.Restoration
    with Trainer(cls(**cls.tiny), tmp_path / "on", threads=1, cudnn_benchmark=True) as t:
        t.fit(1, progress=False)
        assert torch.backends.cudnn.benchmark
        with Trainer(cls(**cls.tiny), tmp_path / "off", threads=1) as other: other.fit(1, progress=False)
        assert not torch.backends.cudnn.benchmark
        t.set(cudnn_benchmark=True)
        t.fit(1, progress=False)
        assert torch.backends.cudnn.benchmark and t.run.environment["cudnn_benchmark"] is True
    torch.backends.cudnn.benchmark = False


def lossy(graph, inputs, factor=0.0):
    "A compiler that is wrong: the first gradient of each graph is multiplied by a factor."
    def spoil(gm, args):
        def run(args):
            held = list(args)
            args.clear()
            out = list(gm(*held))
            i = next((i for i, g in enumerate(out) if torch.is_tensor(g)), None)
            return [g * factor if j == i else g for j, g in enumerate(out)]
        run._boxed_call = True
        return run
    return aot_autograd(fw_compiler=lambda gm, args: gm, bw_compiler=spoil)(graph, inputs)


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    "Weights of runs that never switched: a function of the strategy."
    found = {}
    def get(forced):
        if forced not in found: found[forced] = trained(tmp_path_factory.mktemp("never") / "run", "Restoration", 3)[0]
        return found[forced]
    return get


@pytest.mark.parametrize("forced", (False, True), ids=("host", "device"))
@pytest.mark.parametrize("what", ("model", "blocks"))
@pytest.mark.parametrize("at", (None, 2), ids=("at_start", "while_it_runs"))
def test_wrong_gradients_are_caught_before_a_weight_moves(tmp_path, monkeypatch, never, forced, what, at):
    if forced: monkeypatch.setattr(trainer, "decisions_for", lambda *args: DeviceDecisions)
    plain = never(forced)
    monkeypatch.setattr(bindings, "set_compile", functools.partial(set_compile, backend=functools.partial(lossy, factor=0.5)))
    switch = dict(compile=what)
    weights, _, events, t = trained(tmp_path / "switched", "Restoration", 3, [(at, switch)] if at else (), **({} if at else switch))
    assert type(t.step.decisions) is (DeviceDecisions if forced else HostDecisions)
    assert torch.equal(weights, plain) and t.knobs.compile == "off" == read_compile(t.model)
    assert [(e.step, e.level) for e in events] == [(at or 1, "error")] and "taken back before a weight moved" in events[0].text
    worst = max(events[0].data["worst"].values())
    assert 0.4 < worst < (0.6 if what == "model" else 1), "what one block halves, the next one halves again"
    run = Run(tmp_path / "switched")
    change, = run.changes()
    assert (change.state, change.verified, change.applied_step) == ("reverted", False, at or 1) and change.requested == switch
    assert "not those of the network as written" in change.reason and run.events("revert")[0].step == (at or 1)


def test_wrong_gradients_are_caught_where_a_run_goes_on(tmp_path, monkeypatch):
    "Sound when it was switched on, wrong with the torch that is there when it goes on."
    plain, *_ = trained(tmp_path / "plain", "Restoration", 2)
    _, _, events, t = trained(tmp_path / "run", "Restoration", 1, compile="model")
    assert [e.level for e in events] == ["info", "info"] and "agree to" in events[0].text and read_compile(t.model) == "model"
    monkeypatch.setattr(bindings, "set_compile", functools.partial(set_compile, backend=lossy))
    weights, _, events, t = trained(tmp_path / "run", "Restoration", 1, resume=True)
    assert [e.step for e in events if e.level == "error"] == [2] and t.knobs.compile == "off" == read_compile(t.model)
    assert (weights - plain).abs().max() < 1e-4
    _, _, events, t = trained(tmp_path / "run", "Restoration", 1, resume=True)
    assert t.knobs.compile == "off" and len([e for e in events if e.level == "error"]) == 1, "it stays off"


def test_a_sound_compiler_is_verified_once(tmp_path):
    weights, verified, events, t = trained(tmp_path / "run", "Restoration", 3, [(3, dict(precision="bf16"))], compile="blocks",
        gradient_accumulation_steps=2)
    seen = [e for e in events if "agree to" in e.text]
    assert [e.step for e in seen] == [1, 3] and all(e.level == "info" for e in seen), "another precision is another graph"
    assert max(seen[0].data["worst"].values()) < 1e-4 and verified == [("applied", True)] and read_compile(t.model) == "blocks"
