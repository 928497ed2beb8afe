"""Two processes that train one model: whatever happens to one of them, both do the same."""
import contextlib
import json
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from toys import Half, events, trainer

from medlab import faults
from medlab.core import RunFailed, UserError
from medlab.parallel import replicas
from medlab.recipes.base import Recipe
from medlab.run.directory import Run
from medlab.step.device import DeviceDecisions
from medlab.step.speed import read_compile, set_compile
from medlab.train import trainer as trainer_module

STEPS = 12

PLANS = {
    "no_step_taken": {},
    "half precision": {0: lambda: [faults.gradient("0.weight", at=9)]},
    "gradient": {1: lambda: [faults.gradient("0.weight", at=5)]},
    "one sample": {0: lambda: [faults.batch("x", at=5)]},
    "all samples": {1: lambda: [faults.batch("x", at=5, times=4)]},
    "memory in forward": {1: lambda: [faults.out_of_memory("forward", at=5)]},
    "memory in backward": {0: lambda: [faults.out_of_memory("backward", at=5)]},
    "memory in optimizer": {0: lambda: [faults.out_of_memory("optimizer", at=7)]},
    "no gradient": {1: lambda: [faults.no_gradient(at=5)]},
    "for good": {0: lambda: [faults.gradient("0.weight", at=8, times=8), faults.disk_full("checkpoint", at=6)]},
    "by time": {},
    "a torn scan": {1: lambda: [faults.reader(ValueError("torn"), index=15)]},
    "an error": {1: lambda: [faults.reader(KeyboardInterrupt(), index=50)]},
}


def halved(graph, inputs):
    "A backend of `torch.compile` whose networks return half of what they should."
    return lambda *args: [v / 2 for v in graph(*args)]


COMPILED = {"as written": ("eager", "eager"), "wrong on rank 1": ("eager", halved), "memory on rank 1": ("eager", "eager"), "nothing on rank 1": ("eager", "eager"), "wrong on rank 1, the device decides": ("eager", halved)}  # by rank


class Held:
    "Notes how many bytes of parameters and moments this rank holds after each step."
    def __init__(self, t): self.trainer, self.bytes = t, set()

    def after_step(self, result, batch):
        tensors = [p.data for p in self.trainer.model.parameters()] + [v for s in self.trainer.optimizer.state.values() for k, v in s.items() if k != "step"]
        self.bytes.add(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))


SCORED = dict(val_every_steps=3, val_cases=5, save_every=3, ema=0.9)


class MySGD(torch.optim.SGD): "Nobody knows how it steps."


class Own(Half):
    "With an optimizer of the user's own."
    def build_optimizer(self, params, lr, **kw): return MySGD(params, lr)


class Narrow(Half):
    "With another network."
    def build_model(self): return torch.nn.Linear(4, 1)


class Scored(Half):
    "With cases that are held out, of which one is torn; notes which of them this process has scored."
    metric = "-error"

    def setup(self, split=None): return self.divide([f"half{i:02}" for i in range(64)], split, group=lambda n: n)

    def dataset(self): return [d for d in super().dataset() if d["case"] in self.split.train]

    def score(self, model, name):
        vars(self).setdefault("seen", []).append(name)
        if name == self.split.val[1]: raise ValueError("torn")
        return dict(error=float(model(torch.full((1, 4), float(name[-1]))).square().mean()))

    evaluate = Recipe.evaluate


def rank(number, folder, parallel):
    "One of the two: what every plan came to, a line of JSON each."
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    for i, name in enumerate(PLANS):
        more = {"for good": dict(escalate_after=3), "by time": dict(save_every=0, save_minutes=1, keep=9), "a torn scan": dict(case_budget=1)}.get(name, {})
        knobs = dict(save_every=3, precision="fp16" if name == "half precision" else "fp32", clip_by_loss=True, gradient_accumulation_steps=2) | more
        with trainer(f"{folder}/{i}", Half(), parallel=parallel, **knobs) as t, faults.plant(t, *PLANS[name].get(number, list)()):
            if name == "by time": t.saver.clock = lambda: (20.0, 0.0)[number] * t.iteration
            try: t.fit(STEPS, progress=False)
            except (RunFailed, KeyboardInterrupt) as e: print(name, type(e).__name__, e, file=sys.stderr)
            flat = torch.cat([p.detach().flatten() for p in t.model.parameters()])
            print(json.dumps(dict(name=name, weights=flat.tolist(), number=t.iteration, taken=t.step.optimizer_step, micro=t.knobs.micro_batch, state=t.run.state, kept=t.saver.kept, out=sorted(t.quarantine.samples.out))))
    for name, backends in COMPILED.items() if parallel != "fsdp" else ():
        plan = [faults.out_of_memory("forward", at=1)] * (number == 1 and name.startswith("memory"))
        strategy = mock.patch.object(trainer_module, "decisions_for", lambda optimizer: DeviceDecisions) if name.endswith("decides") else contextlib.nullcontext()
        with strategy, trainer(f"{folder}/{name}", Half(), parallel=parallel, save_every=3, clip_by_loss=True, gradient_accumulation_steps=2) as t, faults.plant(t, *plan):
            if number == 1 and name.startswith("nothing"): t.model.forward = torch.compiler.disable(t.model.forward)
            set_compile(t.model, "model", backend=backends[number])
            t.fit(STEPS, progress=False)
            print(json.dumps(dict(name=name, weights=torch.cat([p.detach().flatten() for p in t.model.parameters()]).tolist(), taken=t.step.optimizer_step, micro=t.knobs.micro_batch, compiled=read_compile(t.model))))
    apart = {}
    for name, path, recipe, knobs in (("path", f"{folder}/apart{number}", Half, {}), ("knobs", f"{folder}/apart", Half, dict(lr=1e-3 + number * 1e-4)), ("network", f"{folder}/network", (Half, Narrow)[number], {})):
        try:
            with trainer(path, recipe(), gradient_accumulation_steps=2, **knobs) as t: t.fit(2, progress=False)
        except UserError as e: apart[name] = str(e)
    for name, how, recipe in (("ways", ("ddp", parallel)[number], Half()), ("steps for all", "zero1", Own())):
        try: trainer(f"{folder}/{name}", recipe, gradient_accumulation_steps=2, parallel=how).close()
        except UserError as e: apart[name] = str(e)
    with trainer(f"{folder}/alone", Half(), gradient_accumulation_steps=2, parallel=parallel) as t:
        t.fit(2, progress=False)
        try:
            if not number: t.save()
            t.fit(2, progress=False)
        except UserError as e: apart["alone"] = str(e)
    with trainer(f"{folder}/scored", Scored(), gradient_accumulation_steps=2, parallel=parallel, **SCORED) as t:
        t.listeners.append(held := Held(t))
        t.fit(6, progress=False)
        whole = {k: p.nbytes for k, p in t.model.named_parameters()}
        told = [e.text for e in t.run.events("validation") if e.level != "info"]
        print(json.dumps(dict(name="scored", seen=t.recipe.seen, errors=t.run.metrics("val_error")["val_error"].value.tolist(), best=t.validation.best, told=told, held=list(t.recipe.split.val), bytes=max(held.bytes), parameters=sum(whole.values()))))
    replicas.LONG = 0.5
    with trainer(f"{folder}/late", Half(), gradient_accumulation_steps=2, parallel=parallel) as t:
        t.fit(2, progress=False)
        if number: time.sleep(2)
        t.save()
        apart["late"] = " ".join(e.text for e in t.run.events("ranks"))
    print(json.dumps(dict(name="apart") | apart))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["ddp", "zero1", "fsdp"])
def outcomes(request, tmp_path_factory):
    "(folder, plan → what the two ranks came to, how they divide their work)"
    path = tmp_path_factory.mktemp("ranks")
    made = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(n), str(path), request.param], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for n in (0, 1)]
    try: out = [p.communicate(timeout=200) for p in made]
    finally: [p.kill() for p in made]
    assert [p.returncode for p in made] == [0, 0], out[0][1][-2000:] + out[1][1][-2000:]
    a, b = ({(d := json.loads(line))["name"]: d for line in o.splitlines()} for o, _ in out)
    return path, {name: (a[name], b[name]) for name in a}, request.param


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_decide_alike(outcomes, tmp_path, name):
    path, (a, b), i = outcomes[0], outcomes[1][name], list(PLANS).index(name)
    runs = [path / str(i), path / str(i) / "ranks/1"]
    assert a == b or name == "an error", "the same weights to the bit, the same steps taken"
    if name == "an error":
        if outcomes[2] == "fsdp": assert all((x == x) != (y == y) for x, y in zip(a["weights"], b["weights"])), "each has its share, and NaN for the other's"
        else: assert a["weights"] == b["weights"]
        assert b["state"] == a["state"] == "failed" and a["number"] == b["number"] and "rank 1 stopped training" in " ".join(events(runs[0], "error"))
        kept = Run(runs[0]).checkpoints()[-1]["step"]
        if outcomes[2] == "ddp": assert kept == a["number"], "what was learned is saved"
        else: assert kept == 3 and f"the state of step {a['number']} is not saved; the newest checkpoint is of step 3" in " ".join(events(runs[0], "checkpoint")) and (told := " ".join(events(runs[1], "checkpoint"))).startswith("2 ranks hold a share each") and f"the state of step {a['number']} is not saved; " in told and told.endswith("checkpoint is of step 3, as far as rank 0 has written by now") + told.endswith("there is no checkpoint, as far as rank 0 has written by now")
        return
    assert a["number"] == STEPS and a["state"] == "done" and all(torch.tensor(a["weights"]).isfinite())
    skipped = [sum(Run(r).metrics("skipped")["skipped"].value) for r in runs]
    if name == "half precision": assert skipped[0] == skipped[1] == STEPS - a["taken"] >= 1
    if name in ("gradient", "no gradient"): assert a["taken"] == STEPS - 1 and skipped == [1, 1] and len(events(runs[1], "skip")) == 1
    if name in ("gradient", "no gradient"): assert len(told := events(runs[0], "skip")) == 1 or outcomes[2] == "fsdp" and len(told) == 2 and "gradient of '0.weight' holds" in " ".join(told), "who has the gradient alone names it"
    if name.startswith("memory"): assert a["taken"] == STEPS and all("rank" in " ".join(events(r, "out_of_memory")) for r in runs[:1] if "PeerFault" in " ".join(events(r, "out_of_memory"))) and any("PeerFault" in s for r in runs for s in events(r, "out_of_memory"))
    if name in ("memory in forward", "memory in backward"): assert a["micro"] == 2 and not events(runs[0], "restore") + events(runs[1], "restore")
    if name == "memory in optimizer": assert [len(events(r, "restore")) for r in runs] == [1, 1] and a["micro"] is None
    if name == "for good": assert all("went back from step 10 to 3" in " ".join(events(r, "recovery_action")) for r in runs), "that of step 6 could not be written"
    if name == "for good": assert len(events(runs[0], "checkpoint_failed")) == 1 and a["kept"] == b["kept"], "and both trained on"
    if name == "by time": assert a["kept"] == b["kept"] == [4, 8, 12], "by rank 0's clock, one step after it has run out; that of rank 1 stands still"
    if name in ("no_step_taken", "one sample"):
        with trainer(tmp_path / "one", Half(), clip_by_loss=True, gradient_accumulation_steps=2) as t, faults.plant(t, *PLANS[name].get(0, list)()):
            t.fit(STEPS, progress=False)
            assert torch.allclose(torch.cat([p.detach().flatten() for p in t.model.parameters()]), torch.tensor(a["weights"]), atol=1e-6), "one process that sees all samples ends there too"
    if name == "one sample": assert sum(Run(runs[0]).metrics("dropped")["dropped"].value) == 1 and a["taken"] == STEPS
    if name == "a torn scan": assert a["out"] == b["out"] == [15] and any("rank 1" in e.text and "torn" in e.text for e in Run(runs[0]).events("quarantine"))
    if name == "all samples": assert sum(Run(runs[1]).metrics("dropped")["dropped"].value) == 4 and a["taken"] == STEPS and skipped == [0, 0], "the other's samples count"


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_network_is_verified_on_all_ranks(outcomes, name):
    "What a rank finds holds for all, before a weight has moved; and all try again where one has no memory for it."
    path, found, parallel = outcomes
    if parallel == "fsdp": pytest.skip("fsdp refuses to compile")
    (a, b), right, wrong = found[name], found["no_step_taken"][0], name.startswith(("wrong", "nothing"))
    assert a == b and a["taken"] == STEPS and a["compiled"] == ("off" if wrong else "model") and a["micro"] == (2 if name.startswith("memory") else None)
    if wrong and not name.endswith("decides"): assert a["weights"] == right["weights"], "to the bit, as nothing but the network as written has moved them"
    else: assert a["weights"] == pytest.approx(right["weights"], abs=1e-6)
    for run in (path / name, path / name / "ranks/1"):
        told = [e for e in Run(run).events("compilation") if "compiled" in e.text and "so far" not in e.text]
        assert [e.level for e in told] == ["error" if wrong else "info"] and ("was taken back" if wrong else "agree to") in told[0].text, told
        assert ("compiled on rank 1, and other ranks compiled it" in told[0].text) == name.startswith("nothing") == ("as written" not in told[0].text)
    assert len(events(path / name, "revert")) == len(events(path / name / "ranks/1", "revert")) == wrong, "each for itself, and not again as what rank 1 says"


def test_held_out_cases_are_divided(outcomes, tmp_path):
    "Each rank scores some of them, one of which is torn, and both know what one process would."
    (a, b), held = outcomes[1]["scored"], outcomes[1]["scored"][0]["held"]
    assert a["seen"] == [held[0]] + held[:5:2] * 2 and b["seen"] == held[1:5:2] * 2, "one was tried before the first step; each of five once in a validation"
    assert a["errors"] == b["errors"] and a["best"] == b["best"] and len(a["best"]["scores"]) == 4
    assert len(a["told"]) == 1 and "1 of 5 cases could not be scored" in a["told"][0] and f"{held[1]}: ValueError: torn" in a["told"][0], "once, and not again as what rank 1 says"
    with trainer(tmp_path / "one", Scored(), gradient_accumulation_steps=2, **SCORED) as t:
        t.fit(6, progress=False)
        assert t.run.metrics("val_error")["val_error"].value.tolist() == pytest.approx(a["errors"], rel=1e-5) and t.validation.best["scores"] == pytest.approx(a["best"]["scores"], rel=1e-5)
        assert t.recipe.seen == [held[0]] + held[:5] * 2


def test_what_is_divided_is_held_once(outcomes):
    "Parameters and moments after a step; what another rank owns is one number for each block."
    found, whole = [told["bytes"] for told in outcomes[1]["scored"]], outcomes[1]["scored"][0]["parameters"]
    if outcomes[2] == "ddp": assert found == [3 * whole] * 2
    if outcomes[2] == "zero1": assert sum(found) == 2 * whole + 2 * whole, "the parameters on both, the moments once"
    if outcomes[2] == "fsdp": assert 3 * whole <= sum(found) <= 3 * whole + 2 * 2 * 4


def test_a_launcher_without_a_process_group_is_refused(tmp_path, monkeypatch):
    for k, v in dict(WORLD_SIZE="2", RANK="0", MASTER_ADDR="localhost").items(): monkeypatch.setenv(k, v)
    with pytest.raises(UserError, match="a launcher started 2 ranks, and each of them would train alone: call torch.distributed.init_process_group"): trainer(tmp_path / "run", Half())
    assert not (tmp_path / "run").exists()


def test_a_rank_that_waits_says_so(outcomes):
    "Planted: rank 1 comes to a checkpoint, which both put together, two seconds late. Clean: it does not wait for rank 0; and with ddp nobody meets."
    first, other = (told["late"] for told in outcomes[1]["apart"])
    assert not other and ("rank 0 of 2 has waited 0.5 s for the others at a checkpoint" in first) == (outcomes[2] != "ddp"), first


def test_ranks_that_would_part_are_refused(outcomes):
    for told in outcomes[1]["apart"]:
        assert "rank 1 does not begin as rank 0 does" in told["path"] and "apart1' and" in told["path"] and "lr is 0.0011 and 0.001 on rank 0" in told["knobs"]
        assert "the network is '2 tensors of 5 values' and '4 tensors of 49 values' on rank 0" in told["network"]
        assert "MySGD may look at all of them: take an optimizer of torch.optim" in told["steps for all"]
        if outcomes[2] != "ddp": assert f"parallel is '{outcomes[2]}' and 'ddp' on rank 0" in told["ways"]
        else: assert "ways" not in told
        if outcomes[2] != "ddp": assert "the ranks do not do the same (rank 0: a checkpoint; rank 1: the start of training)" in told["alone"]
        else: assert "alone" not in told, "rank 0 has all of it"


if __name__ == "__main__": rank(int(sys.argv[1]), *sys.argv[2:])
