"""Machines that come and go while one run trains: a launcher for each, all of them on this one."""
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_launch import WAY, apart, weights
from toys import Half, losses, trainer
from waiting import seen

from medlab.run.directory import Run
from medlab.run.sharing import is_live

pytestmark = pytest.mark.timeout(900)  # on a busy machine each start takes half a minute
STEPS = 250
HALF = [f"{Path(__file__).parent / 'toys.py'}:Half", "--gradient-accumulation-steps", "2", "--save-every", "5", "--device", "cpu", "--threads", "1"]
HALF_SLOWLY = [*HALF, "--seconds", "0.03", "--steps", str(STEPS), "--run-dir", "two", *WAY]


@pytest.fixture
def machine(tmp_path):
    "A function that starts a launcher, as a machine does that comes; with the test all of them end."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    made, env = [], os.environ | dict(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def start(restarts=3, nodes="1:2", place=None, words=()):
        own = [] if place is None else ["--local-addr", place.address]
        launch = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{place.first if place else 'localhost'}:{port}",
            "--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8" + (f",is_host={int(place.address == place.first)}" if place else ""), *own]
        log = tmp_path / f"{len(made)}.log"
        with open(log, "wb") as file:
            made.append(subprocess.Popen([*(place.inside if place else ()), sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *launch, "-m", "medlab", "train", *HALF_SLOWLY, *words],
                cwd=tmp_path, env=env | (place.env if place else {}), stdout=file, stderr=subprocess.STDOUT))
        made[-1].log = log
        return made[-1]

    yield start
    for p in made: gone(p)


@pytest.fixture
def cable():
    "Two hosts with an address each, on this machine, and the cable between them: a function that plugs it in or out, and the hosts."
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    names, hosts = [f"medlab{os.getpid()}{end}" for end in "ab"], []
    try:
        for name in names: ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for i, name in enumerate(names):
            address = f"10.77.0.{i + 1}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"): ip("-n", name, "link", "set", device, "up")
            hosts.append(SimpleNamespace(address=address, first="10.77.0.1", inside=["ip", "netns", "exec", name], env=dict(GLOO_SOCKET_IFNAME="wire")))
    except (OSError, subprocess.CalledProcessError) as e:
        for name in names: subprocess.run(["ip", "netns", "del", name], capture_output=True) if shutil.which("ip") else None
        pytest.skip(f"no hosts of one's own can be made here: {getattr(e, 'stderr', e)}")
    yield lambda there: ip("-n", names[1], "link", "set", "wire", "up" if there else "down"), hosts
    for name in names: subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ranks_of(launcher):
    "The processes of ranks that a launcher has started and not ended."
    try: return [p for p in psutil.Process(launcher.pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE and "medlab" in p.cmdline()]
    except psutil.Error: return []


def gone(launcher):
    "A machine goes without a word."
    for p in [launcher, *ranks_of(launcher)]: p.kill()
    launcher.wait()


def until(true, *launchers, seconds=300):
    "Wait for something, as long as these launchers live."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never became true:\n" + "\n".join(p.log.read_text()[-2000:] for p in launchers)
        for p in launchers: assert p.poll() is None, p.log.read_text()[-3000:]
        time.sleep(0.05)


def world(launcher):
    "How many ranks there are, as those of a launcher were told."
    try: return max((int(p.environ()["WORLD_SIZE"]) for p in ranks_of(launcher)), default=0)
    except psutil.Error: return 0


def goes_on(path, starts, size, *launchers):
    "Wait until the run was taken up so often, and a world of that size has made steps since."
    run = Run(path)
    until(lambda: len(run.events("resume")) == starts and all(world(p) == size for p in launchers), *launchers)
    at = run.events("resume")[-1].step
    until(lambda: run.step > at + 3, *launchers)


def paused(path, launcher):
    "Pause the run, so that its steps last until a machine has come."
    run = Run(path)
    run.command("pause")
    until(lambda: run.state == "paused", launcher)


def test_a_machine_comes_another_dies_and_a_third_comes(machine, tmp_path):
    "One rank, two, one, two; and another job with the same words does not take their run, however often it is started."
    path, first = tmp_path / "two", machine()
    until(lambda: (r := seen(path)) and r.step > 6, first)
    assert world(first) == 1
    paused(path, first)
    second = machine()
    goes_on(path, 1, 2, first, second)
    gone(second)
    goes_on(path, 2, 1, first)
    paused(path, first)
    third = machine()
    goes_on(path, 3, 2, first, third)
    assert [p.wait(200) for p in (first, third)] == [0, 0], first.log.read_text()[-3000:] + third.log.read_text()[-3000:]
    run = Run(path)
    assert run.state == "done" and run.step == STEPS and len(run.events("resume")) == 3
    with trainer(tmp_path / "whole", Half(), gradient_accumulation_steps=2, save_every=5) as t: t.fit(STEPS, progress=False)
    own, whole = losses(path), losses(tmp_path / "whole")
    print("weights apart by", apart(weights(path), weights(tmp_path / "whole")), "losses by", max(abs(own[k] - whole[k]) for k in whole))
    assert apart(weights(path), weights(tmp_path / "whole")) <= 1e-6
    assert own.keys() == whole.keys() and all(abs(own[k] - v) <= 1e-4 * max(1, v) for k, v in whole.items()), "the same samples in the same order"
    fourth = machine(restarts=1, nodes="1:1")
    assert fourth.wait(200) != 0 and fourth.log.read_text().count("holds a run already") == 2, fourth.log.read_text()[-3000:]
    assert len(run.events("resume")) == 3 and run.state == "done"


def test_a_rank_that_is_alone_stops_where_its_launcher_ends(machine, tmp_path):
    path, first = tmp_path / "two", machine(nodes="1:1")
    until(lambda: (r := seen(path)) and r.step > 6, first)
    first.kill()
    end = time.monotonic() + 60
    while is_live(path): assert time.monotonic() < end, "it trains on"; time.sleep(0.1)
    run = Run(path)
    assert run.state == "stopped" and run.checkpoints()[-1]["step"] == run.step < STEPS and run.events("launcher")[-1].text.endswith("--resume two")


def test_a_machine_loses_its_network(machine, cable, tmp_path):
    "Planted: a cable is pulled out, and nobody is told. Both ranks end within their time limit, and the machine where they meet goes on alone."
    (plug, (here, there)), path, wait = cable, tmp_path / "two", ("--rank-wait", "8")
    first = machine(place=here, words=wait)
    until(lambda: (r := seen(path)) and r.step > 6, first)
    paused(path, first)
    second = machine(place=there, words=wait)
    goes_on(path, 1, 2, first, second)
    plug(False)
    pulled = time.monotonic()
    until(lambda: len(Run(path).events("resume")) == 2, first)
    print(f"it went on {time.monotonic() - pulled:.0f} s after the cable was pulled out")
    told = " ".join(e.text for e in Run(path).events("error"))
    assert "does not reach the others any more, since rank 1 ended or hangs" in told, told
    until(lambda: world(first) == 1 and not ranks_of(second), first)
    assert first.wait(200) == 0, first.log.read_text()[-3000:]
    run = Run(path)
    assert run.state == "done" and run.step == STEPS
    with trainer(tmp_path / "whole", Half(), gradient_accumulation_steps=2, save_every=5) as t: t.fit(STEPS, progress=False)
    assert apart(weights(path), weights(tmp_path / "whole")) <= 1e-6
