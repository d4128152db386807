"""Images through the commands: trained on, evaluated, fine-tuned on, and asked about."""

import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from moejax.cli.generate import _encoded, _parser, read_prompts
from moejax.config import ConfigError, VisionConfig
from moejax.config.load import load_config
from moejax.data import ByteTokenizer
from moejax.observability.metrics import read_metrics
from tests.cli.conftest import flags

VISION = {
    "model.vision.num_layers": 1, "model.vision.dim": 16, "model.vision.num_heads": 2,
    "model.vision.head_dim": 8, "model.vision.mlp_dim": 16, "model.vision.patch": 4,
    "model.vision.grid": 4, "model.vision.pad_token": 257, "model.vocab_size": 258,
    "data.image_patches": 32, "data.source": "chat", "data.validation_percent": 25.0,
}  # fmt: skip


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations about images, one of which is none; and a shard."""
    root = tmp_path_factory.mktemp("images")
    lines = []
    for n in range(24):
        (root / f"{n}.png").write_bytes(picture(n) if n != 3 else b"no image")
        content = [{"type": "image", "path": f"{n}.png"}, {"type": "text", "text": "?"}]
        answer = {"role": "assistant", "content": f"{n}"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (root / "chats.jsonl").write_text("\n".join(lines))
    with tarfile.open(root / "shard.tar", "w") as tar:
        for n in range(24):
            for name, data in ((f"{n}.png", picture(n)), (f"{n}.txt", b"%d" % n)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return root


def given(folder, **changes) -> list[str]:
    fields = VISION | {"data.paths": (str(folder / "chats.jsonl"),), "data.seq_len": 40}
    return flags(**fields | changes)


@pytest.mark.slow
def test_a_run_with_images_from_training_to_answers(moejax, folder, tmp_path):
    work = tmp_path / "work"
    trained = moejax("train", "--config=tiny", f"--workdir={work}", *given(folder))
    assert trained.code == 0, trained.err
    assert "images: nothing was learned from 1 samples with a bad one" in trained.out
    assert read_metrics(work)[-1]["bad_images"] == 1

    said = moejax("generate", f"--checkpoint={work}", f"--image={folder}/5.png", "--prompt=?")
    assert said.code == 0, said.err
    alone = moejax(
        "generate", f"--checkpoint={work}", f"--image={folder}/5.png", "--max-new-tokens=3"
    )
    assert alone.code == 0, alone.err

    told = moejax("eval", f"--workdir={work}", "--json")
    assert told.code == 0 and json.loads(told.out)["loss"] > 0

    tuned = tmp_path / "tuned"
    options = (f"--init-from={work}", f"--data={folder}/shard.tar", f"--workdir={tuned}")
    done = moejax("finetune", *options, "--config.train.num_steps=2")
    assert done.code == 0, done.err
    assert load_config(tuned).data.source == "webdataset"


def test_prompts_of_a_file_have_their_images(folder, capfd):
    vision = VisionConfig(num_layers=1, patch=4, pad_token=257)
    seen = SimpleNamespace(tokenizer=ByteTokenizer(), config=SimpleNamespace(vision=vision))
    lines = [
        {"prompt": "?", "images": ["5.png"]},
        {"prompt": "?"},
        {"prompt": "", "image": "6.png"},
    ]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options = _parser().parse(["--checkpoint=x", f"--prompts-file={path}", "--image-patches=4"])[0]
    prompts = read_prompts(options)
    ids, images = _encoded(seen, prompts, options)
    assert ids == [[257, 63], [63], [257]] and [len(own) for own in images] == [1, 0, 1]
    assert f"image {folder}/5.png: 2 x 2 patches, 1 tokens\n" in capfd.readouterr().err
    path.write_text(json.dumps({"prompt": "?", "images": 3}))
    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 1: has images=3\. Write"):
        read_prompts(options)


def test_what_cannot_be_seen_is_one_line(moejax, folder, run_dir):
    both = moejax(
        "generate", f"--checkpoint={run_dir}", "--image=x.png", "--prompts-file=prompts.txt"
    )
    assert both.code == 2 and "--image goes with --prompt" in both.err
    empty = moejax("generate", f"--checkpoint={run_dir}", "--image=")
    assert empty.code == 2 and "--image= is empty: name an image file" in empty.err
    large = moejax("generate", f"--checkpoint={run_dir}", "--prompt=a", f"--tokenizer={run_dir}")
    assert large.code == 2 and large.err.count("\n") == 1
    blind = moejax("generate", f"--checkpoint={run_dir}", f"--image={folder}/5.png")
    assert blind.code == 2 and "no vision tower" in blind.err and blind.err.count("\n") == 1
    untold = moejax(
        "train", "--config=tiny", "--workdir=unused", *given(folder, model__vision__num_layers=0)
    )
    assert untold.code == 2 and "data.image_patches=32 has no effect" in untold.err
