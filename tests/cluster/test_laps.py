"""Two real processes tell each other with a step how they spent the lap before."""

import sys
import textwrap

import pytest

from moejax.cluster import Supervisor
from tests.e2e.small import ROOT

_STEPS = """
import sys, time
sys.path.insert(0, {root!r})
import jax
import jax.numpy as jnp
import numpy as np
from moejax.cluster import join
from moejax.partitioning import make_mesh
from moejax.config import MeshConfig
from moejax.train.agreement import Agreement
from moejax.train.pace import Pace, pace_row
from moejax.train.signals import StopRequest

join()
mesh, pace, stop = make_mesh(MeshConfig(expert=2)), Pace(), StopRequest()
agreement = Agreement(mesh, stop, pace)
count = jax.jit(lambda vote: Agreement.counted({{"one": jnp.ones(())}}, *vote))
with jax.set_mesh(mesh):
    for step in range(4):
        if jax.process_index() == 1:
            with pace.waiting("data"):
                time.sleep(0.3)
        if step == 3 and jax.process_index() == 0:
            stop.signum = 15
        vote = agreement.vote()
        with pace.waiting("devices"):
            metrics = jax.device_get(count(vote))
        agreement.read(metrics)
        pace.restart() if step == 0 else None  # it compiled
row = pace_row(agreement.laps, step_s=0.3)
print(row["straggler"], len(row["rank_busy_s"]), row["data_s"] > 0.25,
      row["rank_busy_s"][0] < 0.2, agreement.name, flush=True)
"""


@pytest.mark.slow
def test_a_late_process_is_known_to_all_and_a_signal_with_it(tmp_path):
    program = textwrap.dedent(_STEPS).format(root=str(ROOT))
    env = "import os; os.environ['JAX_PLATFORMS'] = 'cpu'\n"
    env += "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
    assert Supervisor([sys.executable, "-c", env + program], 2, logs=tmp_path).run() == 0
    for number in range(2):
        said = (tmp_path / f"process-{number:05d}.log").read_text().splitlines()
        assert "1 2 True True SIGTERM" in said
