"""Documents, continuations and choices: equal to plain losses, on every mesh and batch size."""

import functools
from pathlib import Path

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.data import ByteTokenizer, Corpus
from moejax.generate import LanguageModel
from moejax.generate.choices import answer_questions, read_questions
from moejax.generate.documents import score_documents, totals
from moejax.generate.lm_eval import MoejaxLM
from moejax.generate.prompts import continuation_row
from moejax.generate.scoring import Scorer, windows
from tests.generate.decoding import Model
from tests.models.running import FAST_COMPILE, lively
from tests.models.small_configs import small
from tests.sharded.meshes import FSDP2_EXPERT4, ONE

WINDOW = 64
CHOICES = Path(__file__).parents[1] / "fixtures" / "eval" / "choices.jsonl"
# Shorter than a bucket, exactly a window with its end, one byte longer, and several windows.
TEXTS = {
    "a": "x", "b": "def f():\n    return 1\n", "c": "y" * WINDOW, "d": "z" * (WINDOW + 1),
    "e": "Größe: " + "0123456789 " * 18,
}  # fmt: skip
CORPUS = Corpus.from_documents("texts", TEXTS.items())
BYTES = ByteTokenizer()


@functools.cache
def model(mesh: str = "one") -> LanguageModel:
    """A model with a capacity that would drop tokens, and so tell how long a padded row is."""
    cfg = small(
        "kda,mla", 2, vocab_size=257, attn_res_block=0, ffn={"num_dense_layers": 0},
        moe={"capacity_factor": 0.5},
    )  # fmt: skip
    out = Model(*lively(cfg)).on({"one": ONE, "eight": FSDP2_EXPERT4}[mesh])
    out.tokenizer, out.compiler_options = BYTES, FAST_COMPILE
    return out


def scorer(batch_size: int = 3, mesh: str = "one", max_length: int = WINDOW) -> Scorer:
    return Scorer(model(mesh), batch_size=batch_size, max_length=max_length)


@functools.cache
def documents(batch_size: int, mesh: str):
    return score_documents(scorer(batch_size, mesh), BYTES, CORPUS)


def plain(tokens: list[int], first: int = 1) -> np.ndarray:
    """Losses of the tokens from `first` on, out of one row that has no padding but in front."""
    rows, segments = np.zeros((3, WINDOW + 1), np.int32), np.zeros((3, WINDOW + 1), np.int32)
    rows[0, -len(tokens) :], segments[0, -len(tokens) :] = tokens, 1
    losses, counted = model().token_losses(rows, None, segments)
    return losses[0][counted[0]][first - 1 :]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("batch_size", "mesh"),
    [
        (1, "one"), (3, "eight"), (8, "eight"), pytest.param(3, "one", marks=SLOW),
        pytest.param(8, "one", marks=SLOW), pytest.param(1, "eight", marks=SLOW),
    ],
)  # fmt: skip
def test_a_document_has_one_loss_on_every_mesh_and_batch_size(mesh, batch_size):
    want = documents(3, "one")
    got = documents(batch_size, mesh)
    for a, b in zip(got, want, strict=True):
        assert a[:4] == b[:4]
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert totals(got, 99)["loss"] == pytest.approx(totals(want, 99)["loss"], rel=1e-5)


def test_a_short_document_is_scored_whole_and_by_itself():
    name, tokens, scored, size, loss = documents(3, "one")[1]
    assert (name, tokens, scored, size) == ("b", 23, 22, 22)
    assert loss == pytest.approx(plain([*TEXTS["b"].encode(), BYTES.eos_id]).sum(), rel=1e-5)


def test_a_long_document_is_scored_in_windows_that_share_no_fed_token():
    found = documents(3, "one")
    assert [d.scored for d in found] == [1, 22, 64, 65, len(TEXTS["e"].encode())]
    ids = [*TEXTS["e"].encode(), BYTES.eos_id]
    want = [plain(ids[:65]), plain(ids[64:129]), plain(ids[128:193])]
    want.append(plain(ids[-65:], first=65 - (len(ids) - 193)))
    assert sum(map(len, want)) == found[4].scored
    assert found[4].loss == pytest.approx(np.concatenate(want).sum(), rel=1e-5)


@pytest.mark.parametrize("stride", [0, 1, 7, 10])
@pytest.mark.parametrize("length", [1, 2, 10, 11, 12, 35])
def test_windows_score_every_token_once_with_all_the_context_that_fits(length, stride):
    tokens = np.arange(length)
    seen = []
    for row in windows(tokens, 10, stride):
        assert 1 <= row.first < len(row.tokens) == min(length, 11)
        if len(seen):
            assert row.first > 10 - (stride or 10)
        seen += row.tokens[row.first :].tolist()
    assert seen == list(range(1, length))
    for wrong in (-1, 11):
        with pytest.raises(ConfigError, match="stride=.* is not allowed: 1 to 10"):
            windows(tokens, 10, wrong)


def test_few_programs_serve_all_lengths():
    used = scorer()
    score_documents(used, BYTES, CORPUS)
    assert used.lengths == {32, WINDOW}
    with pytest.raises(ConfigError, match="row 0 has 70 tokens"):
        used([windows(np.zeros(70, int), 100)[0]])


def test_rates_charge_the_mean_to_tokens_without_a_loss():
    found = totals(documents(3, "one"), CORPUS.num_bytes)
    tokens = CORPUS.num_bytes + len(TEXTS)
    assert found["num_tokens"] == CORPUS.num_bytes and found["documents"] == len(TEXTS)
    assert found["nats_per_byte"] == pytest.approx(found["loss"] * tokens / CORPUS.num_bytes)
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_byte"] / np.log(2))
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    line = documents(3, "one")[1].as_json()
    assert line["nats_per_byte"] == pytest.approx(line["loss"] / 22 * 23 / 22)


PAIRS = [
    ("Question: a?\nAnswer:", " yes"),
    ("Question: a?\nAnswer: ", "yes"),
    ("", "no"),
    ("q", "r"),
]


@functools.cache
def harness(batch_size: int = 3) -> MoejaxLM:
    out = MoejaxLM(model(), batch_size=batch_size, max_length=WINDOW)
    out.generator.compiler_options = FAST_COMPILE
    return out


def test_log_likelihoods_are_sums_of_token_losses():
    found = harness().loglikelihood(PAIRS)
    for (context, continuation), (value, _) in zip(PAIRS, found, strict=True):
        ids = [*(context.encode() or [BYTES.eos_id]), *continuation.encode()]
        count = len(continuation.encode()) + len(context) - len(context.rstrip())
        assert value == pytest.approx(-plain(ids, len(ids) - count).sum(), rel=1e-5)
    assert found[0] == found[1], "a space at the border belongs to the continuation"
    for other in (1, 8):
        assert harness(other).loglikelihood(PAIRS) == [
            (pytest.approx(value, rel=1e-5), greedy) for value, greedy in found
        ]


def test_what_greedy_generation_says_is_greedy():
    adapter = harness()
    contexts = [context for context, _ in PAIRS if context]
    asked = [(context, {"until": ["\u0000never"], "max_gen_toks": 5}) for context in contexts]
    ids = adapter.generator.generate(
        model().params, model().balance, [list(c.encode()) for c in contexts], max_new_tokens=5
    )
    assert adapter.generate_until(asked) == [BYTES.decode(np.array(i)) for i in ids]
    rows = [continuation_row(BYTES, c, "?????", WINDOW) for c in contexts[::2]]
    for row, new in zip(rows, ids[::2], strict=True):
        row.tokens[-5:] = new
    right = adapter.scorer(rows)
    assert all(scores.greedy.all() for scores in right)
    rows[0].tokens[-1] ^= 1
    wrong = adapter.scorer(rows)[0].greedy
    assert wrong[:4].all() and not wrong[4]


def test_generation_ends_before_its_stop_text_whatever_runs_beside_it():
    adapter = harness()
    free = adapter.generate_until([("def ", {"max_gen_toks": 8})])[0]
    stop = free[2]
    asked = [
        ("def ", {"until": stop, "max_gen_toks": 8}),
        ("def ", {"until": [], "max_gen_toks": 8, "do_sample": True, "seed": 3, "temperature": 2}),
        ("def ", {"max_gen_toks": 8, "temperature": 0.0}),
    ]
    cut, drawn, again = adapter.generate_until(asked)
    assert cut == free.split(stop)[0] and again == free and drawn != free
    with pytest.raises(ConfigError, match="max_gen_toks=64 leaves no room"):
        adapter.generate_until([("a", {"max_gen_toks": 64})])


def test_rolling_log_likelihood_has_a_prefix_and_counts_every_token():
    text = TEXTS["e"]
    (value,) = harness().loglikelihood_rolling([(text,)])
    ids = [BYTES.eos_id, *text.encode()]
    rest = plain(ids[-65:], first=65 - (len(ids) - 193))
    want = [plain(ids[:65]), plain(ids[64:129]), plain(ids[128:193]), rest]
    assert sum(map(len, want)) == len(text.encode())
    assert value == pytest.approx(-np.concatenate(want).sum(), rel=1e-5)


def test_a_long_context_loses_its_left_end():
    row = continuation_row(BYTES, "abc" * 50, "xyz", WINDOW)
    assert bytes(row.tokens.tolist()) == ("abc" * 50 + "xyz").encode()[-WINDOW - 1 :]
    assert row.first == WINDOW + 1 - 3
    for continuation in ("", "x" * (WINDOW + 1)):
        with pytest.raises(ConfigError, match=f"it must have 1 to {WINDOW}"):
            continuation_row(BYTES, "abc", continuation, WINDOW)


def test_choices_are_compared_by_their_log_likelihood():
    questions = read_questions(CHOICES)
    assert len(questions) == 20
    found = answer_questions(scorer(8, max_length=128), BYTES, questions)
    right, right_by_length = 0, 0
    for question, values in zip(questions, found.log_likelihoods, strict=True):
        assert len(values) == len(question.choices)
        right += max(values) == values[question.answer]
        each = [v / len(c) for v, c in zip(values, question.choices, strict=True)]
        right_by_length += max(each) == each[question.answer]
    assert (found.accuracy, found.accuracy_norm) == (right / 20, right_by_length / 20)
    first = questions[0]
    ids = [*first.question.encode(), *f" {first.choices[1]}".encode()]
    want = -plain(ids, len(first.question.encode())).sum()
    assert found.log_likelihoods[0][1] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "holds no question"),
        (b"\xff", "is no UTF-8 text"),
        (b"{", "line 1: not a question"),
        (b'{"question": "a", "choices": ["b"], "answer": 1}', "line 1: not a question"),
        (b'{"question": "a", "choices": ["b", ""], "answer": 0}', "line 1: not a question"),
        (b'{"question": "a", "choices": ["b"], "answer": "b"}', "line 1: not a question"),
        (b'["question"]', "line 1: not a question"),
    ],
)
def test_a_file_that_holds_no_questions_is_one_line(tmp_path, content, message):
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_questions(tmp_path / "q.jsonl")
