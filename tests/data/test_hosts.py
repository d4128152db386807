"""Several hosts, without processes: their rows together are the batches of one, at any restart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import DataConfig
from moejax.config.load import as_run_config
from moejax.data import pipeline
from moejax.data.packing import tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.rows import ShuffledRows
from moejax.data.sources import load_corpus
from moejax.data.tokenize import ByteTokenizer

BYTES = ByteTokenizer()
BATCH = 8


def conversations(count: int) -> str:
    """So many conversations of other lengths each, as JSON lines."""
    records = [
        {"messages": [{"role": "user", "content": f"{i}?"},
                      {"role": "assistant", "content": f"{i} " * (i % 17 + 1)}]}
        for i in range(count)
    ]  # fmt: skip
    return "".join(f"{json.dumps(record)}\n" for record in records)


def config(**data) -> DataConfig:
    values = {"seq_len": 48, "batch_size": BATCH, "tokenizer": "byte", "validation_percent": 20.0}
    return as_run_config({"data": values | data}).data


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Kind of packing -> config, corpus and the batches that one host sees: some two epochs."""
    chat = tmp_path_factory.mktemp("hosts") / "chat.jsonl"
    chat.write_text(conversations(80))
    words = {"source": "synthetic", "synthetic_docs": 20}
    mixture = [{"name": "a", "weight": 0.6, **words}, {"name": "b", "weight": 0.4, **words}]
    cfgs = {
        "packed": config(**words),
        "epochs": config(**words, epochs=2),
        "mixture": config(mixture=mixture),
        "whole": config(source="chat", paths=(str(chat),), seq_len=256),
    }
    made = {}
    for name, cfg in cfgs.items():
        corpus = load_corpus(cfg, "train")
        one = make_train_iterator(cfg, BYTES, corpus, seed=5)
        steps = one.batches_left or 2 * (one.get_state()["rows_per_epoch"] // BATCH + 1)
        made[name] = cfg, corpus, [next(one) for _ in range(steps)]
        one.close()
    return made


def own_rows(index: int, count: int, microbatches: int) -> list[int]:
    """Rows of a host whose devices stand together, of every microbatch."""
    rows = np.arange(BATCH).reshape(microbatches, count, -1)
    return rows[:, index].ravel().tolist()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_hosts_that_come_and_go_read_the_stream_of_one(streams, data):
    """A run of legs: hosts, prefetch, microbatches and steps of each; some are cut short.

    What a leg reads behind its last save counts for nothing, as after a kill.
    """
    cfg, corpus, want = streams[data.draw(st.sampled_from(sorted(streams)))]
    done = data.draw(st.integers(0, len(want) - 1), label="first")
    one = make_train_iterator(cfg, BYTES, corpus, seed=5)
    state = one.get_state() | {"rows": done * BATCH}
    for _ in range(data.draw(st.integers(1, 4), label="legs")):
        count = data.draw(st.sampled_from((1, 2, 4, 8)), label="hosts")
        microbatches = data.draw(
            st.sampled_from([n for n in (1, 2, 4) if n * count <= BATCH]), label="microbatches"
        )
        ahead = cfg.replace(prefetch=data.draw(st.integers(1, 6), label="prefetch"))
        steps = data.draw(st.integers(0, min(6, len(want) - done)), label="steps")
        lost = data.draw(st.integers(0, min(2, len(want) - done - steps)), label="lost")
        states = []
        for index in range(count):
            own = own_rows(index, count, microbatches)
            host = make_train_iterator(
                ahead, BYTES, corpus, seed=5, own=own, start_state=state
            )  # fmt: skip
            for step in range(done, done + steps):
                batch = next(host)
                assert batch.keys() == want[step].keys()
                for key in batch:
                    np.testing.assert_array_equal(batch[key], want[step][key][own])
            states.append(json.dumps(host.get_state()))
            for _ in range(lost):
                next(host)
            host.close()
        assert len(set(states)) == 1  # any host's checkpoint serves all
        state, done = json.loads(states[0]), done + steps
    assert state["rows"] == done * BATCH


def test_a_run_of_epochs_on_changing_hosts_holds_every_token_so_often(streams):
    cfg, corpus, want = streams["epochs"]
    state, seen = None, np.zeros(257, np.int64)
    for count, steps in ((4, 5), (2, 4), (1, len(want) - 9)):
        for index in range(count):
            host = make_train_iterator(
                cfg, BYTES, corpus, seed=5, shard=(index, count), start_state=state
            )
            for _ in range(steps):
                batch = next(host)
                seen += np.bincount(batch["tokens"][batch["segment_ids"] > 0], minlength=257)
            host.close()
        state = host.get_state()
    whole = np.bincount(tokenize_corpus(BYTES, corpus).tokens, minlength=257)
    np.testing.assert_array_equal(seen, 2 * whole)
    assert state["rows"] == len(want) * BATCH


def test_a_host_asks_for_its_own_rows_only(streams, monkeypatch):
    cfg, corpus, _ = streams["packed"]
    asked: list[int] = []

    class Watched(ShuffledRows):  # this host's alone: threads of hosts before it may still read
        def __getitem__(self, n: int):
            asked.append(n)
            return super().__getitem__(n)

    monkeypatch.setattr(pipeline, "ShuffledRows", Watched)
    host = make_train_iterator(cfg.replace(prefetch=1), BYTES, corpus, seed=5, shard=(1, 4))
    for _ in range(5):
        next(host)
    host.close()
    assert {n % BATCH for n in asked} == {2, 3}
    assert set(range(5)) <= {n // BATCH for n in asked}
