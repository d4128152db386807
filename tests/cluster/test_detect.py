"""Who has started this process: environments as launchers make them, halves and contradictions."""

import argparse
import signal

import pytest

from moejax.cli.flags import exit_code
from moejax.cli.main import main
from moejax.cluster import Membership, detect
from moejax.cluster.detect import first_host
from moejax.config import ConfigError

SLURM = {
    "SLURM_JOB_ID": "5000", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-005,9],b1",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
JOBSET = {
    "JOBSET_COORDINATOR": "run-workers-0-0.run", "JOBSET_JOBS": "2", "JOBSET_JOB_INDEX": "1",
    "JOBSET_PODS_PER_JOB": "4", "JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}  # fmt: skip
HAND = Membership("host:1234", 4, 2).as_env()
GKE = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("env", "by", "place", "devices"),
    [
        (HAND, "by hand", ("host:1234", 4, 2), None),
        (SLURM, "SLURM", (f"gpu003:{61440 + 5000 % 4096}", 2, 1), None),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}, "SLURM",
         (f"gpu003:{61440 + 5000 % 4096}", 8, 1), (3,)),
        (SLURM | {"SLURM_NTASKS": "8", "CUDA_VISIBLE_DEVICES": "3"}, "SLURM",
         (f"gpu003:{61440 + 5000 % 4096}", 8, 1), None),
        (OMPI | {"JAX_COORDINATOR_PORT": "77"}, "Open MPI", ("10.96.0.1:77", 4, 3), (1,)),
        (OMPI | SLURM | {"MOEJAX_COORDINATOR": "h:1"}, "Open MPI", ("h:1", 4, 3), (1,)),
        (JOBSET, "JobSet", ("run-workers-0-0.run:61440", 8, 6), None),
        (JOBSET | HAND, "by hand", ("host:1234", 4, 2), None),
    ],
)  # fmt: skip
def test_each_launcher_is_known(env, by, place, devices):
    found = detect(env)
    assert found is not None and found[0] == by
    assert found.place == place and found.local_devices == devices
    assert all("=" in part for part in found.why.split(", ") if by != "SLURM")


def test_what_jax_asks_for_by_itself():
    assert detect({}) is None
    assert detect({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}) is None  # no chips
    for env, tpu, by in (({}, True, "TPU"), (GKE, True, "TPU of GKE"), (GKE, False, "Kubernetes")):
        found = detect(env, has_tpu=tpu)
        assert found is not None and found.by == by and found.place is None


def test_a_job_of_one_task_may_launch_processes_of_its_own():
    inside = SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"} | HAND
    assert detect(inside).by == "by hand"
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"} | HAND
    assert detect(script).by == "by hand"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, "Start the command by srun"),
        (SLURM | {"SLURM_PROCID": ""}, "without SLURM_PROCID"),
        (SLURM | {"SLURM_PROCID": "2"}, "SLURM says process 2 of 2"),
        (SLURM | {"SLURM_NTASKS": "x"}, "SLURM_NTASKS='x' is no whole number"),
        (SLURM | HAND, "SLURM has started this process as 1 of 2"),
        (OMPI | HAND, "Open MPI has started this process as 3 of 4"),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "without OMPI_COMM_WORLD_LOCAL_RANK"),
        (OMPI | {"OMPI_MCA_orte_hnp_uri": ""}, "mpirun -x MOEJAX_COORDINATOR=HOST:PORT"),
        (JOBSET | {"JOBSET_JOBS": ""}, "without JOBSET_JOBS"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "4"}, "an index is not below its number"),
        ({"TPU_WORKER_ID": "0"}, "without TPU_WORKER_HOSTNAMES"),
        (GKE | {"TPU_WORKER_ID": "2"}, "2 hosts have no number 2"),
        ({"MOEJAX_COORDINATOR": "h:1"}, "without MOEJAX_NUM_PROCESSES"),
    ],
)
def test_halves_and_contradictions_are_one_line(env, says):
    with pytest.raises(ConfigError, match=says) as caught:
        detect(env, has_tpu=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[01-15],b", "n01"), ("r[1,3]-n[7-9],x", "r1-n7")],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--multihost"], "nothing here names the other processes"),
        (["--process-id=1"], "MOEJAX_PROCESS_ID without MOEJAX_COORDINATOR"),
        (["--coordinator=h:1", "--num-processes=2", "--process-id=2"], "MOEJAX_PROCESS_ID=2 of"),
        (["--coordinator=h", "--num-processes=2", "--process-id=0"], "give HOST:PORT of process 0"),
    ],
)
def test_a_command_without_a_place_ends_with_one_line(options, says, capsys, monkeypatch):
    for name in ("MOEJAX_COORDINATOR", "MOEJAX_NUM_PROCESSES", "MOEJAX_PROCESS_ID"):
        monkeypatch.setenv(name, "")
    assert main(["train", "--config=tiny", "--workdir=nowhere", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("env", "multihost", "signum", "code"),
    [
        (SLURM, True, signal.SIGTERM, 0),
        (HAND, True, signal.SIGTERM, 0),
        (SLURM, True, signal.SIGINT, 130),
        (SLURM, False, signal.SIGTERM, 143),
        (JOBSET, True, signal.SIGTERM, 143),  # else the drained pod counts as done
        (GKE, True, signal.SIGTERM, 143),
        (JOBSET | HAND, True, signal.SIGTERM, 0),  # `moejax launch` in a pod
        (JOBSET, True, None, 0),
    ],
)
def test_the_exit_code_of_a_run_that_was_asked_to_end(env, multihost, signum, code, monkeypatch):
    for name in ("KUBERNETES_SERVICE_HOST", "MOEJAX_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert exit_code(argparse.Namespace(multihost=multihost), signum) == code
