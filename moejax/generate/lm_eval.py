"""A model as lm-evaluation-harness asks for it (extra `lm-eval`).

    python -m moejax.generate.lm_eval --model moejax --model_args path=runs/tiny --tasks arc_easy

or `lm_eval.simple_evaluate(model=MoejaxLM("runs/tiny"), tasks=[...])`. Importing this module
registers the name "moejax". Without the harness the class works the same on plain tuples.

Source: interface and borders between context and continuation as in lm_eval 0.4.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.data import Tokenizer
from moejax.generate.engine import Buckets, Generator
from moejax.generate.load import load
from moejax.generate.model import LanguageModel
from moejax.generate.prompts import continuation_row, prefix_token, prompt_ids
from moejax.generate.sample import Sampling
from moejax.generate.scoring import Scorer, windows
from moejax.generate.stream import TextStream

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    _Base: Any = LM
except ImportError:  # the methods need nothing of it
    _Base = object

    def register_model(*names: str) -> Any:
        """The harness is not there: the class stays as it is."""
        return lambda cls: cls


@register_model("moejax")
class MoejaxLM(_Base):
    """Log-likelihoods and continuations; requests are the harness' or tuples of their arguments.

    Args:
      path: a model, or what `moejax.load` takes.
      batch_size: rows that run at once.
      max_length: most tokens of a row.
      max_gen_toks: most new tokens where a request does not say.
      dtype: of weights and layers, where `path` is loaded.
      add_bos_token: begin every context with the tokenizer's begin token.
      max_batch_size, device: taken because the harness gives them; JAX chooses the device.
    Raises:
      ConfigError: the model has no tokenizer, or a number is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | LanguageModel,
        *,
        batch_size: int | str = 8,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        dtype: str = "float32",
        add_bos_token: bool = False,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        self.model: LanguageModel = (
            path
            if isinstance(path, LanguageModel)
            else load(path, dtype=dtype, compute_dtype=dtype)
        )
        if self.model.tokenizer is None:
            raise ConfigError(f"{path} has no tokenizer: text needs one.")
        self.tokens: Tokenizer = self.model.tokenizer
        if not str(batch_size).isdigit():
            raise ConfigError(f"batch_size={batch_size!r} is not allowed: give a number of rows.")
        self.max_gen_toks, self.add_bos_token = int(max_gen_toks), bool(add_bos_token)
        self.scorer = Scorer(self.model, batch_size=int(batch_size), max_length=int(max_length))
        self.generator = Generator(
            self.model.parts,
            mesh=self.model.mesh,
            dtype=self.model.compute_dtype,
            buckets=Buckets(batch=self.scorer.batch_size),
        )

    @property
    def tokenizer_name(self) -> str:
        """What the harness files its caches of requests under."""
        return f"{self.tokens.name}-{self.tokens.sha256[:16]}"

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of every (context, continuation): its log-likelihood, and whether greedy would say it."""
        most, bos = self.scorer.max_length, self.add_bos_token
        rows = []
        for request in requests:
            context, continuation = _arguments(request)
            rows.append(continuation_row(self.tokens, context, continuation, most, bos=bos))
        return [(-scores.loss, bool(scores.greedy.all())) for scores in self.scorer(rows)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of every (text,) behind the prefix token, in windows if it is long."""
        rows, owners = [], []
        for number, request in enumerate(requests):
            text = _arguments(request)[0]
            ids = [prefix_token(self.tokens), *self.tokens.encode(text, specials=True).tolist()]
            own = windows(np.asarray(ids, np.int32), self.scorer.max_length)
            rows += own
            owners += [number] * len(own)
        sums = np.zeros(len(requests))
        for number, scores in zip(owners, self.scorer(rows), strict=True):
            sums[number] -= scores.loss
        return sums.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every (context, settings), up to the first of its stop texts.

        Settings: until (text or texts), max_gen_toks, do_sample, temperature, top_p, top_k, seed.
        """
        asked = [_arguments(request) for request in requests]
        out = [""] * len(asked)
        groups: dict[tuple, list[int]] = {}
        for number, (_, settings) in enumerate(asked):
            groups.setdefault(self._group(settings), []).append(number)
        for (limit, sampling), numbers in groups.items():
            contexts = [asked[n][0] for n in numbers]
            stops = [_texts(asked[n][1].get("until")) for n in numbers]
            for n, text in zip(
                numbers, self._continue(contexts, stops, limit, sampling), strict=True
            ):
                out[n] = text
        return out

    def _group(self, settings: dict[str, Any]) -> tuple[int, Sampling]:
        """Most new tokens and the sampling: requests that agree in both run together."""
        limit = int(settings.get("max_gen_toks", settings.get("max_new_tokens", self.max_gen_toks)))
        if limit >= self.scorer.max_length:
            raise ConfigError(
                f"max_gen_toks={limit} leaves no room for a prompt in max_length="
                f"{self.scorer.max_length}."
            )
        warm = float(settings.get("temperature") or 0.0)
        if "do_sample" in settings:  # asked for without a temperature, it is 1
            warm = (warm or 1.0) if settings["do_sample"] else 0.0
        if not warm:
            return limit, Sampling()
        drawn = Sampling(
            temperature=warm, top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", 0)), seed=int(settings.get("seed", 0)),
        )  # fmt: skip
        return limit, drawn

    def _continue(
        self, contexts: list[str], stops: list[list[str]], limit: int, sampling: Sampling
    ) -> list[str]:
        room = self.scorer.max_length - limit
        prompts = []
        for context in contexts:
            ids = prompt_ids(self.tokens, context)
            if self.add_bos_token and self.tokens.bos_id not in (None, ids[0]):
                ids = [self.tokens.bos_id, *ids]
            prompts.append(ids[-room:])
        streams = [TextStream(self.tokens, texts) for texts in stops]
        out = [""] * len(prompts)

        def on_token(row: int, token: int) -> bool:
            out[row] += streams[row].push(token)
            return streams[row].ended

        self.generator.generate(
            self.model.params, self.model.balance, prompts, max_new_tokens=limit,
            sampling=sampling, stop=frozenset(self.tokens.stop_ids), on_token=on_token,
        )  # fmt: skip
        return [text + stream.flush() for text, stream in zip(out, streams, strict=True)]


def _arguments(request: Any) -> tuple:
    """The arguments of a request of the harness, or the tuple itself."""
    return request if isinstance(request, tuple) else request.args


def _texts(until: Any) -> list[str]:
    return [until] if isinstance(until, str) else list(until or ())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
