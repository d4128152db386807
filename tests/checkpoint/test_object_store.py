"""Checkpoints that lie elsewhere than in the workdir: in an object store, or in another folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest

from moejax.checkpoint import CheckpointError, Checkpoints, layout, locate
from moejax.checkpoint.weights import is_hf_folder
from moejax.config import CheckpointConfig, ConfigError
from tests.checkpoint.gcs_stand_in import GcsStandIn
from tests.cluster.faults import FIVE, Job
from tests.e2e.small import SMALL, losses, train

STORE = "gs://bucket/run"
_OLD = {"model__num_layers": 1, "model__attention": "mla", "mesh__fsdp": 8, "mesh__expert": 1,
        "eval__every": 0, "log__tensorboard": False}  # fmt: skip


@pytest.mark.slow
def test_another_folder_has_the_steps_and_is_found_again(tmp_path):
    workdir, other = tmp_path / "run", tmp_path / "disk" / "steps"
    settings = SMALL | {"checkpoint.dir": str(other)}
    train(workdir, settings=settings, fast=True, **_OLD, train__num_steps=2)
    done = train(workdir, settings=settings, fast=True, **_OLD, train__num_steps=4)
    assert f"resuming from {other / '2'}" in done.out
    assert layout.steps_in(other) == [2, 4] and not (workdir / "checkpoints").exists()
    with pytest.raises(ConfigError, match=f"has its checkpoints in {other}: set checkpoint.dir"):
        train(workdir, fast=True, **_OLD, train__num_steps=6)


def test_who_reads_a_run_is_told_where_its_steps_are(tmp_path):
    settings = {"checkpoint": {"dir": STORE}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"keeps its checkpoints in {STORE}: copy one"):
        locate(tmp_path)
    assert not is_hf_folder(tmp_path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    assert locate(tmp_path) == (tmp_path / "checkpoints", None)


def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Orbax writes to gs:// and to folders"):
        CheckpointConfig(dir="s3://bucket/run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs gcsfs: pip install 'moejax\[gcs\]'"):
        Checkpoints(tmp_path, CheckpointConfig(dir=STORE))


@pytest.fixture
def store(monkeypatch):
    """A bucket on this machine, which processes started meanwhile take for Google's."""
    pytest.importorskip("gcsfs")
    with GcsStandIn() as store:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            monkeypatch.setenv(name, store.url)
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "none")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        # else tensorstore looks for credentials, and gcsfs asks Google what kind of bucket it is
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield store


def _steps(store: GcsStandIn) -> list[int]:
    names = [name.split("/") for name in store.objects]
    return sorted(int(n[1]) for n in names if n[0] == "run" and n[2:] == ["commit_success.txt"])


@pytest.mark.slow
def test_a_run_of_two_processes_keeps_its_steps_in_a_store(store, tmp_path):
    """Stopped, killed in a save, with a step that was never finished, it is the run of a folder."""
    cache, last = tmp_path / "compiled", FIVE["train__num_steps"]
    straight = Job(tmp_path / "straight", cache)
    assert straight.end() == 0, straight.said
    job = Job(tmp_path / "run", cache, checkpoint__dir=STORE, train__stop_at=4)
    assert job.end() == 0, job.said
    assert _steps(store) == [2, 4] and not (job.workdir / "checkpoints").exists()

    del store.objects["run/4/commit_success.txt"]  # as if it had been killed before the last file
    job = Job(job.workdir, cache, "--restarts=1", checkpoint__dir=STORE)
    job.wait_for(lambda: any(name.startswith("run/6/") for name in store.objects))
    job.kill(0)
    assert job.end() == 0, job.said
    assert job.said.count(f"resuming from {STORE}/") == 2
    assert f"resuming from {STORE}/2" in job.said
    assert losses(job.workdir, last=last) == losses(straight.workdir, last=last)
    assert _steps(store) == [8, 10, 12]
    assert all(name.split("/")[1] in ("8", "10", "12") for name in store.objects)


@pytest.mark.slow
def test_a_file_that_is_cut_in_the_store_is_found(store, tmp_path):
    job = Job(tmp_path / "run", tmp_path / "compiled", checkpoint__dir=STORE, train__stop_at=4)
    assert job.end() == 0, job.said
    name = next(
        name for name in store.objects if name.startswith("run/4/params/") and "/d/" in name
    )
    store.put(name, store.objects[name].data[:-1])
    job = Job(job.workdir, tmp_path / "compiled", checkpoint__dir=STORE, train__stop_at=6)
    assert job.end() == 0, job.said
    assert f"checkpoint {STORE}/4 is damaged" in job.said
    assert f"resuming from {STORE}/2" in job.said


def test_settings_of_checkpoints_name_the_folder(tmp_path):
    cfg = dataclasses.replace(CheckpointConfig(), dir=str(tmp_path / "steps"))
    assert Checkpoints(tmp_path / "run", cfg).path(3) == tmp_path / "steps" / "3"
    assert Checkpoints(tmp_path / "run").path(3) == tmp_path / "run" / "checkpoints" / "3"
