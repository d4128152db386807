"""The loss of rows with many conversations is the sum of the conversations' alone, on any mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from moejax.config.load import load_config
from moejax.data import ByteTokenizer
from moejax.data.chat import ChatEncoder, ChatRules
from moejax.data.packing import Documents
from moejax.data.whole_rows import WholeRows
from moejax.partitioning import make_mesh
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from moejax.train.step import eval_step
from tests.cli.conftest import SMALL

SEQ_LEN = 48
MODEL = SMALL | {
    "model.num_layers": 2, "model.attention": "kda", "model.last_attention": "dsa",
    "model.ffn.num_dense_layers": 1, "model.moe.num_experts": 8, "model.kda.chunk": 16,
}  # fmt: skip


def conversations() -> list[Documents]:
    """Prompts and answers of many lengths, as one each."""
    random = np.random.default_rng(0)
    texts = [
        f'{{"prompt": "{"ab" * random.integers(1, 8)}", "completion": "{"cd" * n}"}}'
        for n in random.integers(1, 9, 16)
    ]
    tokenizer = ByteTokenizer()
    made = ChatEncoder(tokenizer, ChatRules())(texts, texts)
    return [
        Documents(
            one.tokens, np.array([0, len(one.tokens)]), tokenizer.eos_id, one.trained,
            np.array([one.num_bytes]),
        )
        for one in made
    ]  # fmt: skip


def joined(documents: list[Documents]) -> Documents:
    return dataclasses.replace(
        documents[0],
        tokens=np.concatenate([one.tokens for one in documents]),
        starts=np.cumsum([0, *(len(one.tokens) for one in documents)]),
        trained=np.concatenate([one.trained for one in documents]),
        trained_bytes=np.concatenate([one.trained_bytes for one in documents]),
    )


def in_eights(rows: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Batches of 8 rows, the last filled with rows of padding."""
    empty = {"tokens": 0, "segment_ids": 0, "labels": -100}
    padding = {key: np.full(SEQ_LEN, value, np.int32) for key, value in empty.items()}
    rows = rows + [padding] * (-len(rows) % 8)
    return [
        {key: np.stack([row[key] for row in rows[at : at + 8]]) for key in padding}
        for at in range(0, len(rows), 8)
    ]


@pytest.mark.parametrize("expert", [1, 4])
def test_packed_rows_have_the_loss_of_their_conversations_alone(expert):
    cfg = load_config("tiny", MODEL | {"mesh.expert": expert})
    program = build_program(cfg, make_mesh(cfg.mesh))
    state = init_state(program, 0)
    documents = conversations()
    packed = WholeRows(joined(documents), np.arange(len(documents)), SEQ_LEN)
    alone = [WholeRows(one, np.arange(1), SEQ_LEN).row(0) for one in documents]
    together = [packed.row(n) for n in range(packed.num_rows)]
    assert packed.num_rows <= 8 and max(row["segment_ids"].max() for row in together) >= 3
    with jax.set_mesh(program.mesh):
        step = jax.jit(lambda batch: eval_step(program, state.params, state.balance, batch))
        sums = [
            np.sum([jax.device_get(step(put_batch(program, batch, 1))) for batch in batches], 0)
            for batches in (in_eights(alone), in_eights(together))
        ]
    assert sums[0][1] == sums[1][1] == packed.num_labels
    np.testing.assert_allclose(sums[1][0], sums[0][0], rtol=2e-6)
