"""`moejax generate`: text that a model continues."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moejax.cli.flags import Parser, add_devices, is_first_process, positive, start_devices
from moejax.config import ConfigError, RunConfig
from moejax.config.data import IMAGE_STYLES
from moejax.config.load import apply_overrides

if TYPE_CHECKING:
    from moejax.generate import LanguageModel

EXAMPLES = (
    'moejax generate --checkpoint=runs/tiny --prompt="def main(" --max-new-tokens=100',
    "moejax generate --checkpoint=runs/tiny/checkpoints/200 --prompt='# ' --temperature=0.8 \\",
    "    --top-p=0.95 --seed=1",
    "moejax generate --checkpoint=runs/tiny --prompts-file=prompts.txt --output=out.jsonl",
    "moejax generate --checkpoint=runs/digits --image=seven.png",
    "moejax generate --checkpoint=runs/tiny --devices=8 --config.mesh.expert=4",
)


def main(argv: Sequence[str]) -> int:
    """One prompt: its continuation, as it comes. A file: one JSON line a prompt."""
    options, overrides = _parser().parse(argv)
    if not options.checkpoint:
        raise ConfigError("--checkpoint is needed: a workdir, a step in it, or a model folder.")
    if options.image and options.prompts_file is not None:
        raise ConfigError("--image goes with --prompt, or stands alone.")
    if not options.image and (options.prompt is None) == (options.prompts_file is None):
        raise ConfigError("give one of --prompt=TEXT and --prompts-file=FILE.")
    if options.output and options.prompts_file is None:
        raise ConfigError("--output goes with --prompts-file; one prompt is printed.")
    cfg = run_config(overrides)
    prompts = [options.prompt] if options.prompts_file is None else read_prompts(options)
    start_devices(options)

    from moejax.generate import Sampling, load
    from moejax.train.compile import enable_cache

    settings = _settings(options)
    Sampling(**settings)  # before the weights are read
    enable_cache(cfg.compile_cache)
    model = load(
        options.checkpoint, mesh=cfg.mesh, compute_dtype=options.dtype, base=options.base or ""
    )
    if model.tokenizer is None:
        raise ConfigError(f"{options.checkpoint} has no tokenizer: text needs one.")
    if options.prompts_file is None:
        _stream(model, prompts[0] or "", options, settings)
    else:
        write_lines(_continue_all(model, prompts, options, settings), options.output)
    return 0


def run_config(overrides: dict[str, str]) -> RunConfig:
    """The mesh that is asked for, without that all devices along fsdp; and the compile cache."""
    foreign = [n for n in overrides if not n.startswith("mesh.") and n != "compile_cache"]
    if foreign:
        raise ConfigError(
            f"--config.{foreign[0]} changes nothing here: only --config.mesh.* and "
            "--config.compile_cache do, the rest is the checkpoint's."
        )
    return apply_overrides(RunConfig(), overrides)


def _parser() -> Parser:
    parser = Parser(
        "generate",
        what="Continues text with a trained model. Of the config only --config.mesh.* and "
        "--config.compile_cache can be changed; any mesh, batch size and order of prompts gives "
        "the same text.",
        examples=EXAMPLES,
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="a workdir, a step, a model folder")
    parser.add_argument(
        "--base", metavar="DIR", help="of a LoRA run: its base (default: the run's init_from)"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", help="what to continue; streamed as it comes")
    text.add_argument(
        "--prompts-file", metavar="FILE",
        help='a prompt a line; of a .jsonl file the "prompt" of every object',
    )  # fmt: skip
    text.add_argument(
        "--image", metavar="FILE", action="append", default=[],
        help="an image in front of --prompt, which may be left out; may be given several times",
    )  # fmt: skip
    text.add_argument(
        "--image-style", choices=IMAGE_STYLES, default="auto",
        help="how it stands there (default: data.image_style's auto)",
    )  # fmt: skip
    text.add_argument("--output", metavar="FILE", help="where the JSON lines go (default: printed)")
    text.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128"
    )
    text.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    text.add_argument(
        "--stop-token", action="append", default=[], type=int, metavar="ID",
        help="end at this token too; the tokenizer's own end tokens always count",
    )  # fmt: skip
    draw = parser.add_argument_group("sampling")
    draw.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy")
    draw.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all tokens")
    draw.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: all tokens")
    draw.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="compute dtype (default: float32)",
    )  # fmt: skip
    add_devices(parser)
    return parser


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of a file.

    Raises:
      ConfigError: there is none, or a line of a .jsonl file has no text under "prompt".
    """
    path = pathlib.Path(options.prompts_file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}).") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_from_json(path, number, line) if path.suffix == ".jsonl" else line)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write one a line.")
    return prompts


def _from_json(path: pathlib.Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'{path}, line {number}: no JSON object with a text under "prompt".')
    return prompt


def encode(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a prompt; an empty one has one too."""
    from moejax.generate.prompts import prompt_ids

    assert model.tokenizer is not None  # the caller's check
    return prompt_ids(model.tokenizer, text)


def _stops(model: LanguageModel, options: argparse.Namespace) -> set[int]:
    assert model.tokenizer is not None
    return {*model.tokenizer.stop_ids, *options.stop_token}


def _stream(
    model: LanguageModel, prompt: str, options: argparse.Namespace, settings: dict[str, Any]
) -> None:
    from moejax.generate import TextStream, generate
    from moejax.generate.prompts import image_prompt

    assert model.tokenizer is not None
    stream = TextStream(model.tokenizer, options.stop)

    def show(text: str) -> None:
        if is_first_process():
            print(text, end="", flush=True)

    def on_token(row: int, token: int) -> bool:
        show(stream.push(token))
        return stream.ended

    ids, images = image_prompt(
        model.tokenizer, prompt, options.image, model.config.vision, style=options.image_style
    )
    generate(
        model, [ids], max_new_tokens=options.max_new_tokens, stop=_stops(model, options),
        on_token=on_token, images=[images] if images else None, **settings,
    )  # fmt: skip
    show(stream.flush() + "\n")


def _continue_all(
    model: LanguageModel, prompts: list[str], options: argparse.Namespace, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Prompt, text, ids of the new tokens, and what ended them, of every prompt."""
    from moejax.generate import TextStream, generate

    assert model.tokenizer is not None
    streams = [TextStream(model.tokenizer, options.stop) for _ in prompts]
    texts = ["" for _ in prompts]

    def on_token(row: int, token: int) -> bool:
        texts[row] += streams[row].push(token)
        return streams[row].ended

    tokens = generate(
        model, [encode(model, prompt) for prompt in prompts],
        max_new_tokens=options.max_new_tokens, stop=_stops(model, options), on_token=on_token,
        **settings,
    )  # fmt: skip
    lines = []
    for row, prompt in enumerate(prompts):
        text = texts[row] + streams[row].flush()
        short = streams[row].ended or len(tokens[row]) < options.max_new_tokens
        finish = "stop" if short else "length"
        lines.append({"prompt": prompt, "text": text, "tokens": tokens[row], "finish": finish})
    return lines


def write_lines(lines: list[dict[str, Any]], output: str | None) -> None:
    """JSON lines to a file, which appears whole or not at all; without one they are printed."""
    if not is_first_process():
        return
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not output:
        sys.stdout.write(text)
        return
    from moejax.data.tokenize import write_at_once

    write_at_once(pathlib.Path(output).absolute(), text)
