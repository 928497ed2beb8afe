"""What `medlab deploy` writes: read by the tools that it is written for, run in the shell with a launcher that only records, and run for real on the CPU."""
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from medlab.cli.main import main
from medlab.run.directory import Run

NASTY = "it's \"one\" $HOME\nline"
RECORD = """#!/usr/bin/env python3
import json, os, sys, signal, time
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


def deployed(folder, kind, *words, run="runs/a", **env):
    "Status of the command that writes a folder."
    return main(["deploy", kind, str(folder), "--recipe", "restoration", "--debug", "--steps", "2", "--run", str(run), *map(str, words)])


@pytest.fixture
def fake(tmp_path):
    "A Python that only records what it was called with."
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


def test_one_gpu_is_plain_train_which_begins_and_goes_on(tmp_path, fake):
    run = tmp_path / NASTY
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=run) == 0
    assert sh(tmp_path, tmp_path / "s/train.sh").returncode == 0
    run.mkdir()
    (run / "run.db").touch()
    assert sh(tmp_path, tmp_path / "s/train.sh", "--device", "cpu").returncode == 0
    (first, ignored), (second, _) = recorded(tmp_path)
    assert first == ["-m", "medlab", "train", "restoration", "--config", str(tmp_path / "s/config.yml"), "--run", str(run), "--steps", "2"] and ignored
    assert second == ["-m", "medlab", "train", "restoration", "--resume", str(run), "--steps", "2", "--device", "cpu"]


def test_many_gpus_are_launched_with_words_that_the_launcher_takes(tmp_path, fake):
    "Its own parser reads them, and `--run` is left to medlab; without `--` it would be refused."
    from torch.distributed.run import get_args_parser
    assert deployed(tmp_path / "s", "slurm", "--python", fake, "--gpus", 4, "--nodes", 2, run=tmp_path / "r") == 0
    assert sh(tmp_path, tmp_path / "s/train.sh", SLURM_NODEID="1", HEAD_NODE="n1", HEAD_PORT="20007", SLURM_JOB_ID="7", GO_ON="").returncode == 0
    (words, _), = recorded(tmp_path)
    assert words[:2] == ["-m", "torch.distributed.run"]
    a = get_args_parser().parse_args(words[2:])
    assert (a.nnodes, a.nproc_per_node, a.rdzv_backend, a.rdzv_endpoint, a.rdzv_conf, a.module) == ("2", "4", "c10d", "n1:20007", "is_host=false", True)
    assert a.training_script == "medlab" and a.training_script_args[:2] == ["train", "restoration"] and "--run" in a.training_script_args
    with pytest.raises(SystemExit): get_args_parser().parse_args([w for w in words[2:] if w != "--"])


def test_a_launcher_that_chose_is_believed(tmp_path, fake):
    "A node that starts late sees a run that the first has begun, and must do what that does."
    run = tmp_path / "r"
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=run) == 0
    run.mkdir()
    (run / "run.db").touch()
    for go_on in ("", "yes"): sh(tmp_path, tmp_path / "s/train.sh", GO_ON=go_on)
    assert ["--resume" in words for words, _ in recorded(tmp_path)] == [False, True]


@pytest.mark.parametrize("number,status", [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_signal_asks_once_and_is_waited_for(tmp_path, fake, number, status):
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=tmp_path / "r") == 0
    env = {**os.environ, "RECORD": str(tmp_path / "record"), "WAIT": "1"}
    p = subprocess.Popen(["bash", str(tmp_path / "s/train.sh")], env=env)
    until = time.monotonic() + 30
    while not (tmp_path / "record.ready").exists() and time.monotonic() < until: time.sleep(0.05)
    p.send_signal(number)
    assert p.wait(30) == status and (tmp_path / "record.heard").read_text() == "1"


def test_job_queues_itself_again_when_it_was_asked_to_save(tmp_path, fake):
    "`srun`, `scancel` and `scontrol` on the path only record; srun ends when it is signalled through scancel."
    assert deployed(tmp_path / "s", "slurm", "--python", fake, run=tmp_path / "r") == 0
    bin = tmp_path / "bin"
    bin.mkdir()
    log = tmp_path / "calls"
    wait = '[ -z "$SLOW" ] || while [ ! -e "$LOG.stop" ]; do sleep 0.05; done; exit ${STATUS:-0}'
    for name, more in dict(srun=wait, scancel='touch "$LOG.stop"', scontrol='[ "$1" != show ] || echo n1').items():
        (bin / name).write_text(f'#!/bin/bash\necho {name} "$@" GO_ON=$GO_ON >> "$LOG"\n{more}\n')
        (bin / name).chmod(0o755)
    base = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLOW": ""}
    assert subprocess.run(["bash", str(tmp_path / "s/job.sh")], env={**base, "STATUS": "3"}).returncode == 3
    assert "requeue" not in log.read_text(), "a failure is not tried for ever"
    p = subprocess.Popen(["bash", str(tmp_path / "s/job.sh")], env={**base, "SLOW": "1"})
    until = time.monotonic() + 30
    while log.read_text().count("srun") < 2 and time.monotonic() < until: time.sleep(0.05)
    p.send_signal(signal.SIGUSR1)
    assert p.wait(30) == 0
    assert "scancel --signal=USR1 7.0" in log.read_text() and "scontrol requeue 7" in log.read_text()


@pytest.mark.parametrize("kind,words", [("slurm", ()), ("docker", ())])
def test_it_trains_and_goes_on(tmp_path, kind, words):
    "The script itself, with this Python, on the CPU: twice."
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert deployed(tmp_path / "s", kind, "--device", "cpu", "--threads", 1, *words, run=tmp_path / "a b") == 0
    script = tmp_path / "s/train.sh"
    run = tmp_path / "a b"
    if kind == "docker":  # its run lies in /runs, which only the container has
        script.write_text(script.read_text().replace("'/runs/a b'", shlex.quote(str(run))).replace("python=python", f"python={shlex.quote(sys.executable)}"))
    for steps in ((), ("--steps", "3")):
        done = subprocess.run(["bash", str(script), *steps], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert Run(run).step == 3 and "step 2 → 3" in done.stdout
    assert deployed(tmp_path / "again", kind, run=run) == 2, "a run that is there"
    assert main(["deploy", kind, str(tmp_path / "again"), "--run", str(run), "--steps", "5"]) == 0
    assert "steps=5" in (tmp_path / "again/train.sh").read_text()


@pytest.mark.parametrize("words,told", [(("slurm", "D", "--recipe", "restoration", "--gpus", "0"), "--gpus 0 must"), (("slurm", "D", "--recipe", "restoration", "--gpus", "-2"), "--gpus -2 must"),
    (("slurm", "D", "--recipe", "restoration", "--time", "60"), "try --time 24:00:00"), (("slurm", "full", "--recipe", "restoration"), "not empty: x; nothing is replaced"),
    (("kubernetes", "D", "--recipe", "restoration", "--image", "m:1", "--claim", "A b"), "try a-b"), (("slurm", "D"), "what is to be trained"), (("slurm",), "which folder"),
    (("slrum", "D", "--recipe", "restoration"), "slurm"), (("docker", "D", "--recipe", "restoration", "--partition", "p"), "of slurm, not of docker"), (("slurm", "D", "--run", "none"), "holds no run")])
def test_mistakes(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    assert main(["deploy", *words]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "D").exists()


def test_the_shell_is_clean(tmp_path):
    check = tool("shellcheck")
    assert deployed(tmp_path / "s", "slurm", "--gpus", 2, "--nodes", 2, run=tmp_path / NASTY) == 0
    for name in ("job.sh", "train.sh"): assert not (found := subprocess.run([check, str(tmp_path / "s" / name)], capture_output=True, text=True).stdout), found
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
    assert deployed(tmp_path / name, "kubernetes", "--image", "m:1", "--claim", "runs", "--gpus", 8, "--nodes", 2, "--data-root", tmp_path, run=tmp_path / NASTY.replace("\n", " ")) == 0
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
