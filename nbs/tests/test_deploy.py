"""What `medlab deploy` writes: read by the tools that it is written for, run in the shell with a launcher that only records, and run for real on the CPU."""
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import until

from medlab.cli.main import main
from medlab.recipes.restoration import Restoration
from medlab.run.directory import Run
from medlab.train.trainer import Trainer

NASTY = "it's \"one\" $HOME\nline"
RECORD = f"""#!{sys.executable}
import json, os, sys, signal, time
if sys.argv[1] == "-c": os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
with open(os.environ["RECORD"], "a") as f: f.write(json.dumps([sys.argv[1:], signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN]) + "\\n")
if os.environ.get("WAIT"):
    heard = []
    signal.signal(signal.SIGTERM, lambda *a: heard.append(time.time()))
    open(os.environ["RECORD"] + ".ready", "w").close()
    while not heard: time.sleep(0.05)
    time.sleep(0.5)
    open(os.environ["RECORD"] + ".heard", "w").write(str(len(heard)))
    sys.exit(130)
"""
MICRO = "--gradient-accumulation-steps"


def deployed(folder, kind, *words, run="runs/a"):
    "Status of the command that writes a folder."
    return main(["deploy", kind, str(folder), "--recipe", "restoration", "--debug", "--steps", "2", "--run", str(run), *map(str, words)])


@pytest.fixture(scope="session")
def a_step(tmp_path_factory):
    "A run that took a step."
    with Trainer(Restoration(**Restoration.tiny), tmp_path_factory.mktemp("there") / "run", threads=1) as t: t.fit(1, progress=False)
    return t.path


@pytest.fixture
def fake(tmp_path):
    "A Python that only records what it was called with; what a script asks of its run is answered."
    file = tmp_path / "fake python"
    file.write_text(RECORD)
    file.chmod(0o755)
    return file


def recorded(tmp_path): return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


def tool(name):
    "A program beside this Python or on the path; the test is skipped where there is none."
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if not found: pytest.skip(f"{name} is not installed; what it would say was not tested")
    return found


def sh(tmp_path, *argv, **env):
    "A script, with what it needs to be told."
    return subprocess.run(["bash", *map(str, argv)], env={**os.environ, "RECORD": str(tmp_path / "record"), **env}, capture_output=True, text=True, timeout=120)


def test_one_gpu_is_plain_train_which_begins_and_goes_on(tmp_path, fake, a_step):
    run = tmp_path / NASTY
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=run) == 0
    run.mkdir()
    assert sh(tmp_path, tmp_path / "s/train.sh").returncode == 0
    shutil.copytree(a_step, run, dirs_exist_ok=True)
    assert sh(tmp_path, tmp_path / "s/train.sh", "--device", "cpu").returncode == 0
    (first, ignored), (second, _) = recorded(tmp_path)
    assert first == ["-m", "medlab", "train", "restoration", "--config", str(tmp_path / "s/config.yml"), "--run-dir", str(run), "--steps", "2"] and ignored
    assert second == ["-m", "medlab", "train", "restoration", "--resume", str(run), "--steps", "2", "--device", "cpu"]


def test_gpus_of_one_node_are_left_to_medlab(tmp_path, fake):
    "Kubeflow tells a pod that it is rank 0; the process that starts the ranks is none."
    assert deployed(tmp_path / "s", "slurm", "--python", fake, "--gpus", 4, MICRO, 4, "--restarts", 3, run=tmp_path / "r") == 0
    assert sh(tmp_path, tmp_path / "s/train.sh", RANK="0", WORLD_SIZE="4", MASTER_ADDR="a").returncode == 0
    (words, _), = recorded(tmp_path)
    assert words[:3] == ["-m", "medlab", "train"] and words[-6:] == ["--steps", "2", "--processes", "4", "--restarts", "3"]
    assert 'unset RANK WORLD_SIZE' in (tmp_path / "s/train.sh").read_text()


def test_nodes_are_launched_with_words_that_the_launcher_takes(tmp_path, fake):
    "Its own parser reads them; `--run` it would take for its own `--run-path`."
    from torch.distributed.run import get_args_parser
    assert deployed(tmp_path / "s", "slurm", "--python", fake, "--gpus", 4, "--nodes", 2, MICRO, 8, run=tmp_path / "r") == 0
    assert sh(tmp_path, tmp_path / "s/train.sh", SLURM_NODEID="1", HEAD_NODE="n1", HEAD_PORT="20007", SLURM_JOB_ID="7", GO_ON="").returncode == 0
    (words, _), = recorded(tmp_path)
    assert words[:2] == ["-m", "torch.distributed.run"]
    a = get_args_parser().parse_args(words[2:])
    assert (a.nnodes, a.nproc_per_node, a.rdzv_backend, a.rdzv_endpoint, a.rdzv_conf, a.module) == ("2", "4", "c10d", "n1:20007", "is_host=false,read_timeout=600", True)
    assert a.training_script == "medlab" and a.training_script_args[:2] == ["train", "restoration"] and "--run-dir" in a.training_script_args
    with pytest.raises(SystemExit): get_args_parser().parse_args(["--run" if w == "--run-dir" else w for w in words[2:] if w != "medlab"])
    lost = sh(tmp_path, tmp_path / "s/train.sh", GO_ON="")
    assert lost.returncode and "which of the nodes is this one" in lost.stderr


def test_a_launcher_that_chose_is_believed(tmp_path, fake, a_step):
    "A node that starts late sees a run that the first has begun, and must do what that does."
    run = tmp_path / "r"
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=run) == 0
    shutil.copytree(a_step, run)
    for go_on in ("", "yes"): sh(tmp_path, tmp_path / "s/train.sh", GO_ON=go_on)
    assert ["--resume" in words for words, _ in recorded(tmp_path)] == [False, True]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_once_and_is_waited_for(tmp_path, fake, number):
    "Though it comes twice, and to every process of the script's group."
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=tmp_path / "r") == 0
    env = {**os.environ, "RECORD": str(tmp_path / "record"), "WAIT": "1", "GO_ON": ""}
    p = subprocess.Popen(["bash", str(tmp_path / "s/train.sh")], env=env, start_new_session=True)
    until((tmp_path / "record.ready").exists, 30)
    for _ in range(2): os.killpg(p.pid, number)
    assert p.wait(30) == 0 and (tmp_path / "record.heard").read_text() == "1"


def test_a_node_that_is_asked_to_stop_before_it_trains_does_not_begin(tmp_path, fake):
    assert deployed(tmp_path / "s", "docker", run=tmp_path / "r") == 0
    (tmp_path / "python").write_text(f"#!/bin/sh\ntouch '{tmp_path}/asking'\n[ $1 = -c ] || touch '{tmp_path}/began'\nsleep 1\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    p = subprocess.Popen(["bash", str(tmp_path / "s/train.sh")], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    until((tmp_path / "asking").exists, 30)
    p.send_signal(signal.SIGTERM)
    assert p.wait(30) == 143 and not (tmp_path / "began").exists()


@pytest.fixture
def slurm(tmp_path):
    "What runs job.sh with `srun`, `scancel` and `scontrol` that only record; srun waits for scancel where it is SLOW."
    bin, log = tmp_path / "bin", tmp_path / "calls"
    bin.mkdir()
    wait = '[ -z "$SLOW" ] || while [ ! -e "$LOG.stop" ]; do sleep 0.05; done; exit ${STATUS:-0}'
    for name, more in dict(srun=wait, scancel='touch "$LOG.stop"', scontrol='[ "$1" != show ] || echo n1').items():
        (bin / name).write_text(f'#!/bin/bash\necho {name} "$@" GO_ON=$GO_ON >> "$LOG"\n{more}\n')
        (bin / name).chmod(0o755)
    base = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLOW": ""}
    def start(**env):
        log.write_text("")
        return subprocess.Popen(["bash", str(tmp_path / "s/job.sh")], env={**base, **env})
    return start, log.read_text


def test_job_queues_itself_again_until_its_run_has_ended(tmp_path, a_step, slurm):
    start, calls = slurm
    run = tmp_path / "r"
    assert deployed(tmp_path / "s", "slurm", run=run) == 0
    assert start(STATUS="3").wait(60) == 3 and "requeue" not in calls(), "a failure is not tried for ever"
    p = start(SLOW="1")
    until(lambda: "srun" in calls(), 60)
    p.send_signal(signal.SIGUSR1)
    assert p.wait(60) == 0 and "scancel --signal=USR1 7.0" in calls() and "scontrol requeue 7" in calls() and "GO_ON=yes" not in calls()
    shutil.copytree(a_step, run)
    assert start().wait(60) == 0 and "requeue" not in calls() and "GO_ON=yes" in calls(), "it is done"


def here(script, run):
    "A container's script, with what is here in the place of what only the container has."
    text = script.read_text().replace(f"run={shlex.quote(f'/runs/{run.name}')}", f"run={shlex.quote(str(run))}").replace("python=python", f"python={shlex.quote(sys.executable)}")
    script.write_text(text)
    return script


def ended(*processes):
    "Their exit statuses; what they printed is shown where a test fails."
    for p in processes: print(p.communicate(timeout=120)[0])
    return [p.returncode for p in processes]


def begin(script, *words, **env):
    "Start a node."
    return subprocess.Popen(["bash", str(script), *map(str, words)], env={**os.environ, "OMP_NUM_THREADS": "1", **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(run):
    "Steps that a run took; 0 before it is there."
    try: return Run(run).step
    except Exception: return 0


@pytest.mark.parametrize("kind,words,nodes,preempted", [pytest.param("docker", (), 1, 143, marks=pytest.mark.long), pytest.param("slurm", ("--gpus", 2), 1, 0, marks=pytest.mark.long), ("kubernetes", ("--nodes", 2, "--image", "m:1", "--claim", "c"), 2, 143)])
def test_it_begins_is_preempted_and_goes_on_to_its_target(tmp_path, kind, words, nodes, preempted):
    "The scripts themselves, with this Python, on the CPU; nodes are processes that meet at a port of this machine."
    run, script, far = tmp_path / "a b", tmp_path / "s/train.sh", 10**6
    assert deployed(tmp_path / "s", kind, "--device", "cpu", "--threads", 1, MICRO, 2, "--steps", far, *words, run=run) == 0
    here(script, run)
    def start(*more):
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = str(s.getsockname()[1])
        return [begin(script, *more, NODE_RANK=str(i), HEAD_NODE="localhost", HEAD_PORT=port) for i in range(nodes)]
    ranks = start()
    until(lambda: steps_of(run) > 1 or any(r.poll() is not None for r in ranks), 100)
    ranks[-1].send_signal(signal.SIGTERM)
    assert ended(*ranks) == [preempted] * nodes
    assert Run(run).state == "stopped" and 1 < (there := Run(run).step) == Run(run).checkpoints()[-1]["step"]
    ranks = start("--steps", there + 2)
    assert ended(*ranks) == [0] * nodes
    assert Run(run).state == "done" and Run(run).step == there + 2 and Run(run).segments()[-1][0] == there


def test_a_run_that_is_there_is_gone_on_with(tmp_path, a_step, capsys):
    run = tmp_path / "r"
    shutil.copytree(a_step, run)
    assert deployed(tmp_path / "no", "slurm", run=run) == 2 and f"--resume {run} goes on with it" in capsys.readouterr().err
    resumed = lambda *words: main(["deploy", "slurm", str(tmp_path / "s"), "--resume", str(run), *words])
    assert resumed() == 2 and "at step 1 of 1 already" in capsys.readouterr().err
    assert resumed("--steps", "5", "--set", "lr=1e-4") == 2 and "each start of the job would set it anew" in capsys.readouterr().err
    assert resumed("--steps", "2", "--device", "cpu", "--threads", "1") == 0 and not (tmp_path / "s/config.yml").exists()
    assert ended(begin(tmp_path / "s/train.sh")) == [0] and Run(run).step == 2
    shutil.rmtree(run)
    assert ended(begin(tmp_path / "s/train.sh")) == [2], "it must not begin anew"


@pytest.mark.parametrize("words,told", [(("slurm", "D", "--recipe", "restoration", "--gpus", "0"), "--gpus 0 must"), (("slurm", "D", "--recipe", "restoration", "--gpus", "-2"), "--gpus -2 must"),
    (("slurm", "D", "--recipe", "restoration", "--time", "60"), "try --time 24:00:00"), (("slurm", "full", "--recipe", "restoration"), "not empty: x; nothing is replaced"),
    (("kubernetes", "D", "--recipe", "restoration", "--image", "m:1", "--claim", "A b"), "try a-b"), (("slurm", "D"), "what is to be trained"), (("slurm",), "which folder"),
    (("slrum", "D", "--recipe", "restoration"), "slurm"), (("docker", "D", "--recipe", "restoration", "--partition", "p"), "of slurm, not of docker"), (("slurm", "D", "--resume", "none"), "none")])
def test_mistakes(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    assert main(["deploy", *words]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "D").exists()


def test_the_shell_is_clean(tmp_path):
    check = tool("shellcheck")
    for kind, words in (("slurm", ("--nodes", 2)), ("slurm", ("--gpus", 2)), ("docker", ())):
        place = tmp_path / f"{kind}{len(words and words[0])}"
        assert deployed(place, kind, *words, MICRO, 2, run=tmp_path / NASTY) == 0
        assert not (found := subprocess.run([check, *map(str, place.glob("*.sh"))], capture_output=True, text=True).stdout), found
    (tmp_path / "bad.sh").write_text("#!/bin/bash\ncd $1\n")
    assert subprocess.run([check, str(tmp_path / "bad.sh")], capture_output=True).returncode == 1


def test_the_dockerfile_is_clean(tmp_path):
    check = tool("hadolint")
    assert deployed(tmp_path / "d", "docker", run=tmp_path / "r") == 0
    assert not (found := subprocess.run([check, str(tmp_path / "d/Dockerfile")], capture_output=True, text=True).stdout), found
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN pip install torch\n")
    assert {"DL3007", "DL3013"} <= set(subprocess.run([check, str(tmp_path / "Dockerfile")], capture_output=True, text=True).stdout.replace(":", " ").split())


def kubernetes(tmp_path, name="k"):
    "The documents of all three files."
    assert deployed(tmp_path / name, "kubernetes", "--image", "m:1", "--claim", "runs", "--gpus", 8, "--nodes", 2, MICRO, 16, "--data-root", tmp_path, run=tmp_path / NASTY.replace("\n", " ")) == 0
    return {d["kind"]: d for f in ("job.yml", "pytorchjob.yml", "trainjob.yml") for d in yaml.safe_load_all((tmp_path / name / f).read_text())}


def test_kubernetes_takes_the_job(tmp_path):
    check = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed; the Job was not held to its schema")
    found = kubernetes(tmp_path)
    for kind in ("Service", "Job"): check.validate(found[kind], check.latest_version(), strict=True)
    found["Job"]["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(check.ValidationError): check.validate(found["Job"], check.latest_version(), strict=True)
    # a PyTorchJob's pods and a runtime's are pods: the same schema holds for them
    pods = [r["template"] for r in found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()] + [found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]]
    for p in pods:
        pod = dict(apiVersion="v1", kind="Pod", metadata=dict(name="a"), spec=p["spec"])
        check.validate(pod, check.latest_version(), strict=True)


def test_kubeflow_takes_the_trainjob(tmp_path):
    "By the models of its own client; for a PyTorchJob there is none that does not need the whole client of Kubernetes."
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed; the TrainJob was not held to its models")
    found = kubernetes(tmp_path)
    for kind, cls in dict(TrainJob=models.TrainerV1alpha1TrainJob, TrainingRuntime=models.TrainerV1alpha1TrainingRuntime).items():
        made = json.loads(cls.from_dict(found[kind]).to_json())
        assert made == {k: v for k, v in found[kind].items()}, "its models know every key, or one would be gone"
    found["TrainJob"]["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError): models.TrainerV1alpha1TrainJob.from_dict(found["TrainJob"])


def test_slurm_takes_the_job(tmp_path):
    check = tool("sbatch")
    if subprocess.run([shutil.which("sinfo") or "sinfo"], capture_output=True).returncode: pytest.skip("no Slurm answers here, and sbatch --test-only asks one")
    assert deployed(tmp_path / "s", "slurm", "--memory", "1G", "--cpus", 1, run=tmp_path / "r") == 0
    done = subprocess.run([check, "--test-only", str(tmp_path / "s/job.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_commands_that_readme_and_lesson_give(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    texts = (root / "README.md").read_text(), json.loads((root / "nbs/tutorials/from_one_gpu_to_many.ipynb").read_text())
    lesson = "".join(line for c in texts[1]["cells"] for line in c["source"])
    found = [w for text in (texts[0], lesson) for w in re.findall(r"medlab (deploy slurm job [^`#\n]*)", text)]
    assert len(found) == 2, found
    monkeypatch.chdir(tmp_path)
    (tmp_path / "masks").mkdir()
    for i, words in enumerate(found): assert main([*shlex.split(words.replace(" job ", f" job{i} ")), "--steps", "9"]) == 0, words
