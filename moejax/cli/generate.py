"""`moejax generate`: text that a model continues."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moejax.cli.flags import Parser, add_devices, is_first_process, positive, start_devices
from moejax.config import ConfigError, RunConfig
from moejax.config.data import IMAGE_STYLES
from moejax.config.load import apply_overrides

if TYPE_CHECKING:
    from moejax.data import Tokenizer
    from moejax.data.image_marks import ImageRef
    from moejax.data.patches import PatchedImage
    from moejax.generate import LanguageModel

# Patches of an image, 1,024 tokens, above which a remark is due: attention grows with the square.
_MANY_PATCHES = 4096

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
    if "" in options.image:
        raise ConfigError("--image= is empty: name an image file, such as --image=seven.png.")
    if options.image and options.prompts_file is not None:
        raise ConfigError(
            "--image goes with --prompt, or stands alone; lines of a .jsonl file have `images`."
        )
    if not options.image and (options.prompt is None) == (options.prompts_file is None):
        raise ConfigError("give one of --prompt=TEXT and --prompts-file=FILE.")
    if options.output and options.prompts_file is None:
        raise ConfigError("--output goes with --prompts-file; one prompt is printed.")
    cfg = run_config(overrides)
    if options.prompts_file is None:
        prompts = [Prompt(options.prompt or "", options.image)]
    else:
        prompts = read_prompts(options)
    start_devices(options)

    from moejax.generate import Sampling, load
    from moejax.train.compile import enable_cache

    settings = _settings(options)
    Sampling(**settings)  # before the weights are read
    tokenizer = _named_tokenizer(options.tokenizer)
    enable_cache(cfg.compile_cache)
    model = load(
        options.checkpoint, mesh=cfg.mesh, compute_dtype=options.dtype, base=options.base or ""
    )
    if tokenizer is not None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise ConfigError(
                f"--tokenizer={options.tokenizer} has {tokenizer.vocab_size} tokens, the model "
                f"{model.config.vocab_size}. Name the one that it was trained with."
            )
        model.tokenizer = tokenizer
    if model.tokenizer is None:
        raise ConfigError(
            f"{options.checkpoint} has no tokenizer: text needs one. Name it: --tokenizer=PATH, or "
            "--tokenizer=byte for a run with data.tokenizer=byte."
        )
    if options.prompts_file is None:
        _stream(model, prompts[0], options, settings)
    else:
        write_lines(_continue_all(model, prompts, options, settings), options.output)
    return 0


class Prompt(NamedTuple):
    """A text to continue, and the images in front of it."""

    text: str
    images: Sequence[str | ImageRef] = ()


def _named_tokenizer(name: str | None) -> Tokenizer | None:
    """The tokenizer of a file or folder, or "byte"; None where none is named."""
    from moejax.data import ByteTokenizer, load_tokenizer

    if not name:
        return None
    return ByteTokenizer() if name == "byte" else load_tokenizer(name)


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
        help='a prompt a line; of a .jsonl file the "prompt" of every object, with the files of '
        'its "images" in front, relative to the .jsonl',
    )  # fmt: skip
    text.add_argument(
        "--image", metavar="FILE", action="append", default=[],
        help="an image in front of --prompt, which may be left out; may be given several times",
    )  # fmt: skip
    text.add_argument(
        "--image-style", choices=IMAGE_STYLES, default="auto",
        help="how it stands there (default: data.image_style's auto)",
    )  # fmt: skip
    text.add_argument(
        "--image-patches", type=positive, metavar="N",
        help="shrink images to so many patches at most (default: model.vision.max_patches)",
    )  # fmt: skip
    text.add_argument(
        "--tokenizer", metavar="PATH", help="where the model came without one; byte: of bytes"
    )
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


def read_prompts(options: argparse.Namespace) -> list[Prompt]:
    """The prompts of a file.

    Raises:
      ConfigError: there is none, or a line of a .jsonl file has no text under "prompt", or images
        that are no files here.
    """
    path = pathlib.Path(options.prompts_file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}).") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            read = _from_json(path, number, line) if path.suffix == ".jsonl" else Prompt(line)
            prompts.append(read)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write one a line.")
    return prompts


def _from_json(path: pathlib.Path, number: int, line: str) -> Prompt:
    from moejax.data.image_marks import listed_images

    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
        prompt = record["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: no JSON object with a text under "prompt".')
    return Prompt(prompt, listed_images(record, str(path.parent), where))


def _encoded(
    model: LanguageModel, prompts: Sequence[Prompt], options: argparse.Namespace
) -> tuple[list[list[int]], list[list[PatchedImage]] | None]:
    """Token ids of prompts, an empty one has one too, and their images, whose sizes are told."""
    from moejax.generate.prompts import image_prompt

    assert model.tokenizer is not None  # the caller's check
    vision = model.config.vision
    if options.image_patches:
        vision = vision.replace(max_patches=min(options.image_patches, vision.max_patches))
    ids, images = [], []
    for prompt in prompts:
        tokens, own = image_prompt(
            model.tokenizer, prompt.text, prompt.images, vision, style=options.image_style
        )
        for file, image in zip(prompt.images, own, strict=True):
            _tell_size(file if isinstance(file, str) else file.label, image)
        ids.append(tokens)
        images.append(own)
    return ids, images if any(images) else None


def _tell_size(name: str, image: PatchedImage) -> None:
    """What an image costs, before it does."""
    if not is_first_process():
        return
    rows, columns = image.grid[1:]
    hint = ""
    if image.num_patches > _MANY_PATCHES:
        hint = f"; that takes long: --image-patches={_MANY_PATCHES} shrinks it"
    size = f"{rows} x {columns} patches, {image.num_tokens:,} tokens"
    print(f"image {name}: {size}{hint}", file=sys.stderr)


def _stops(model: LanguageModel, options: argparse.Namespace) -> set[int]:
    assert model.tokenizer is not None
    return {*model.tokenizer.stop_ids, *options.stop_token}


def _stream(
    model: LanguageModel, prompt: Prompt, options: argparse.Namespace, settings: dict[str, Any]
) -> None:
    from moejax.generate import TextStream, generate

    assert model.tokenizer is not None
    stream = TextStream(model.tokenizer, options.stop)

    def show(text: str) -> None:
        if is_first_process():
            print(text, end="", flush=True)

    def on_token(row: int, token: int) -> bool:
        show(stream.push(token))
        return stream.ended

    ids, images = _encoded(model, [prompt], options)
    generate(
        model, ids, max_new_tokens=options.max_new_tokens, stop=_stops(model, options),
        on_token=on_token, images=images, **settings,
    )  # fmt: skip
    show(stream.flush() + "\n")


def _continue_all(
    model: LanguageModel,
    prompts: list[Prompt],
    options: argparse.Namespace,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """Prompt, text, ids of the new tokens, and what ended them, of every prompt."""
    from moejax.generate import TextStream, generate

    assert model.tokenizer is not None
    streams = [TextStream(model.tokenizer, options.stop) for _ in prompts]
    texts = ["" for _ in prompts]

    def on_token(row: int, token: int) -> bool:
        texts[row] += streams[row].push(token)
        return streams[row].ended

    ids, images = _encoded(model, prompts, options)
    tokens = generate(
        model, ids, max_new_tokens=options.max_new_tokens, stop=_stops(model, options),
        on_token=on_token, images=images, **settings,
    )  # fmt: skip
    lines = []
    for row, prompt in enumerate(prompts):
        text = texts[row] + streams[row].flush()
        short = streams[row].ended or len(tokens[row]) < options.max_new_tokens
        finish = "stop" if short else "length"
        line = {"prompt": prompt.text, "text": text, "tokens": tokens[row], "finish": finish}
        if prompt.images:
            line["images"] = [i if isinstance(i, str) else i.label for i in prompt.images]
        lines.append(line)
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
