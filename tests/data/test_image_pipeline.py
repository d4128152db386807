"""Conversations and shards with images: into rows, resumed to the bit, bad ones left out."""

import io
import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from moejax.config import ConfigError, DataConfig, VisionConfig
from moejax.data import (
    ByteTokenizer,
    chat_facts,
    load_corpus,
    make_eval_batches,
    make_train_iterator,
)
from moejax.data.image_marks import ImageRef, has_marks, split_marks, without_marks
from moejax.data.images import image_size, read_image
from moejax.data.whole_rows import IGNORED, fit_both

BYTES = ByteTokenizer()
PAD, P = 300, 4
VISION = VisionConfig(num_layers=1, patch=P, pad_token=PAD)
KEYS = {"tokens", "segment_ids", "labels", "pixels", "image_ids", "places", "feature_at"}


def png(height: int, width: int, seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def message(role: str, *parts) -> dict:
    named = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": role, "content": named}


def image(path: str) -> dict:
    return {"type": "image", "path": path}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty conversations, half of them with one or two images of several sizes."""
    root = tmp_path_factory.mktemp("chats")
    (root / "pictures").mkdir()
    lines = []
    for n in range(20):
        for which in "ab":
            data = png(8 * (1 + n % 3), 8 * (1 + (n + (which == "b")) % 2), n)
            (root / "pictures" / f"{n}{which}.png").write_bytes(data)
        parts = {
            0: ["what is it? "],
            1: [image(f"pictures/{n}a.png"), "what?"],
            2: ["first ", image(f"pictures/{n}a.png"), " or ", image(f"pictures/{n}b.png")],
            3: ["no picture"],
        }[n % 4]
        messages = [message("user", *parts), message("assistant", f"number {n}")]
        lines.append(json.dumps({"messages": messages}))
    (root / "chats.jsonl").write_text("\n".join(lines))
    return root


def config(folder, **changes) -> DataConfig:
    given = {
        "source": "chat", "paths": (str(folder / "chats.jsonl"),), "tokenizer": "byte",
        "seq_len": 96, "batch_size": 2, "image_patches": 48, "prefetch": 2,
    }  # fmt: skip
    return DataConfig(**given | changes)


def iterator(cfg: DataConfig, **options):
    corpus = load_corpus(cfg, "train")
    return make_train_iterator(cfg, BYTES, corpus, seed=3, vision=VISION, **options)


def take(batches, count: int) -> list[dict]:
    return [next(batches) for _ in range(count)]


def assert_same(got: list[dict], want: list[dict]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys() == KEYS
        for name in KEYS:
            np.testing.assert_array_equal(mine[name], theirs[name])


def test_rows_hold_the_pictures_where_their_pads_stand(folder):
    batches = iterator(config(folder))
    pictures = {
        read_image(str(path), "x").tobytes() for path in sorted((folder / "pictures").iterdir())
    }
    seen = 0
    for batch in take(batches, 12):
        assert batch["pixels"].dtype == np.uint8 and batch["pixels"].shape == (2, 48, 3, P, P)
        at, tokens = batch["feature_at"], batch["tokens"]
        np.testing.assert_array_equal(at >= 0, tokens == PAD)
        # No pad is a label, and what is learned are answers only.
        assert (batch["labels"] != PAD).all() and (batch["labels"] >= 0).any()
        for row in range(2):
            ids, places = batch["image_ids"][row], batch["places"][row]
            assert np.count_nonzero(ids) == 4 * np.count_nonzero(at[row] >= 0)
            for number in range(1, ids.max() + 1):
                own = ids == number
                rows, columns = places[own][0, 2:]
                whole = np.zeros((rows * P, columns * P, 3), np.uint8)
                for (r, c, _, _), patch in zip(places[own], batch["pixels"][row][own], strict=True):
                    whole[r * P : r * P + P, c * P : c * P + P] = patch.transpose(1, 2, 0)
                assert whole.tobytes() in pictures
                seen += 1
    assert seen > 10 and batches.bad_images == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_sees_the_same_bits(folder, workers):
    cfg = config(folder, num_workers=workers)
    whole = iterator(cfg)
    want = take(whole, 9)
    whole.close()
    first = iterator(cfg)
    take(first, 4)
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    again = iterator(cfg, start_state=state)
    assert_same(take(again, 5), want[4:])
    again.close()


def test_two_processes_share_a_batch(folder):
    cfg = config(folder)
    want = take(iterator(cfg), 3)
    halves = [take(iterator(cfg, shard=(n, 2)), 3) for n in range(2)]
    both = [
        {name: np.concatenate([half[step][name] for half in halves]) for name in KEYS}
        for step in range(3)
    ]
    assert_same(both, want)


def shard(path, samples: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in samples:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def captions(count: int) -> list[tuple[str, bytes]]:
    files = []
    for n in range(count):
        files += [(f"a/{n:03}.png", png(8, 16, n)), (f"a/{n:03}.txt", b"caption %d" % n)]
    return files


def test_shards_give_captions_behind_their_images(tmp_path):
    files = captions(6)
    files[5:6] = [("a/002.json", json.dumps({"text": "other"}).encode())]
    chat = {"messages": [message("user", {"type": "image"}, "?"), message("assistant", "yes")]}
    files += [("b/1.seg.jpg", png(8, 8, 1, "JPEG")), ("b/1.json", json.dumps(chat).encode())]
    shard(tmp_path / "s.tar", files)
    cfg = DataConfig(
        source="webdataset", paths=(str(tmp_path / "*.tar"),), tokenizer="byte", seq_len=96,
        batch_size=1, image_patches=64, validation_percent=10.0,
    )  # fmt: skip
    corpus = load_corpus(cfg, "all")
    assert [name for name in sorted(corpus.names)][-1] == "s.tar:b/1"
    batches = list(make_eval_batches(cfg, BYTES, corpus, 1, vision=VISION))
    texts = set()
    for batch in batches:
        ids, tokens = batch["segment_ids"][0], batch["tokens"][0]
        texts |= {BYTES.decode(tokens[ids == n]) for n in range(1, ids.max() + 1)}
    assert {"caption 0", "caption 1", "other"} <= texts
    assert "### user\n?\n### assistant\nyes" in texts
    # Links and what else is no file are not read, and a name that leads away opens nothing.
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        link = tarfile.TarInfo("a/x.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(ConfigError, match="hold no samples"):
        load_corpus(cfg.replace(paths=(str(tmp_path / "t.tar"),)), "all")
    shard(
        tmp_path / "u.tar", [("../../etc/passwd.png", png(8, 8, 0)), ("../../etc/passwd.txt", b"c")]
    )
    (text,) = load_corpus(cfg.replace(paths=(str(tmp_path / "u.tar"),)), "all").texts
    (ref,) = [p for p in split_marks(json.loads(text)["prompt"]) if isinstance(p, ImageRef)]
    assert ref.source() == png(8, 8, 0) and ref.file == str(tmp_path / "u.tar")


@pytest.mark.parametrize(
    "files, why",
    [
        ([("1.png", b"x")], "s.tar:1: no caption"),
        ([("1.txt", b"x")], "s.tar:1: no image"),
        ([("1.png", b"x"), ("1.json", b"[1]")], "must be a JSON object, not list"),
        ([("1.png", b"x"), ("1.txt", b"\xff")], "s.tar:1: not UTF-8"),
        (None, "not a readable tar file"),
    ],
)
def test_bad_shards_are_refused_by_name(tmp_path, files, why):
    path = tmp_path / "s.tar"
    if files is None:
        path.write_bytes(b"\x1f\x8b" + bytes(100))
    else:
        shard(path, files)
    with pytest.raises(ConfigError, match=why):
        load_corpus(DataConfig(source="webdataset", paths=(str(path),)), "all")


def test_text_and_images_are_mixed_by_weight(folder, tmp_path):
    shard(tmp_path / "s.tar", captions(8))
    cfg = config(folder).replace(
        mixture=(
            {"name": "pictures", "source": "webdataset", "paths": (f"{tmp_path}/s.tar",)},
            {"name": "text", "source": "synthetic", "weight": 3.0},
        )
    )
    rows = [batch["image_ids"].any(1) for batch in take(iterator(cfg), 8)]
    assert np.concatenate(rows).sum() == 4
    found = make_eval_batches(cfg, BYTES, load_corpus(cfg, "validation"), 2, vision=VISION)
    assert sum(batch["image_ids"].any() for batch in found) >= 1


def test_bad_images_are_left_out_by_name_and_counted(folder, tmp_path, caplog):
    good = json.loads((folder / "chats.jsonl").read_text().splitlines()[1])
    (tmp_path / "pictures").mkdir()
    lines = []
    broken = png(8, 8, 0)[:-30]  # its head is right
    kinds = {"none": None, "no.png": b"text", "half.png": broken, "good.png": png(8, 8, 0)}
    for name, data in kinds.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        good["messages"][0] = message("user", image(name), "what?")
        lines.append(json.dumps(good))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    one = {"validation_paths": (str(tmp_path / "chats.jsonl"),), "batch_size": 1, "epochs": 3}
    cfg = config(tmp_path, **one)
    batches = iterator(cfg)
    assert batches.bad_images == 2  # known before anything is decoded
    batch = next(batches)
    assert batches.bad_images == 3
    state = json.loads(json.dumps(batches.get_state()))
    resumed = iterator(cfg, start_state=state)
    assert resumed.bad_images == 3  # nothing of it is read again
    assert len(list(batches)) == len(list(resumed)) == 2
    assert batches.bad_images == resumed.bad_images == 3  # once, not every epoch
    assert iterator(cfg, start_state=state | {"corpus_sha256": ""}).bad_images == 2
    with pytest.raises(ConfigError, match="bad_images=3, which is not one"):
        iterator(cfg, start_state=state | {"bad_images": 3})
    learned = [set(batch["segment_ids"][batch["labels"] >= 0].tolist())]
    assert len(learned[0]) == 1 and batch["segment_ids"].max() == 2
    told = caplog.text
    for name in ("none: cannot be read", "no.png: cannot be decoded", "half.png: cannot be"):
        assert name in told, told
    assert "good.png" not in told
    damaged = [r.getMessage() for r in caplog.records if "Nothing of the sample" in r.getMessage()]
    assert len(damaged) == 2 and all(line.startswith("chats.jsonl:3: ") for line in damaged)

    corpus = load_corpus(cfg, "train")
    facts = chat_facts(cfg, BYTES, corpus, VISION)
    assert facts.lines()[0].startswith("conversations: 4, 2 of them left out for bad images, ")
    assert facts.lines()[-2].startswith("### user\n[image, 1 tokens]what?\n### assistant\n>>>")
    held_out = make_eval_batches(cfg, BYTES, corpus, 1, vision=VISION)
    assert (held_out.num_left_out, held_out.num_bad_images, held_out.num_damaged) == (2, 2, 0)
    assert len(list(held_out)) == len(list(held_out)) == 1
    assert (held_out.num_left_out, held_out.num_bad_images, held_out.num_damaged) == (2, 2, 1)


def test_a_mixture_tells_the_bad_rows_of_its_members_apart(tmp_path):
    (tmp_path / "half.png").write_bytes(png(8, 8, 0)[:-30])
    line = json.dumps({"prompt": "", "image": "half.png", "completion": "x"})
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(line)
    members = [
        {"name": n, "source": "chat", "paths": (f"{tmp_path}/{n}.jsonl",),
         "validation_paths": (f"{tmp_path}/{n}.jsonl",)}
        for n in "ab"
    ]  # fmt: skip
    cfg = config(tmp_path).replace(mixture=members, epochs=2)
    batches = iterator(cfg)
    assert len(list(batches)) == 2 and batches.bad_images == 2
    assert sorted(batches.get_state()["bad_images"]["damaged"]) == [[0, 0, 1], [1, 0, 1]]


def test_samples_with_too_many_patches_are_named(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png(16, 16, 0))  # 16 patches
    record = {"prompt": "p", "images": ["a.png", "b.png"], "completion": "x"}
    read_lines(tmp_path, record | {"images": "a.png"}, record)
    one = {"validation_paths": (str(tmp_path / "chats.jsonl"),), "image_patches": 16}
    cfg = config(tmp_path, **one)
    corpus = load_corpus(cfg, "train")
    (told,) = [x for x in chat_facts(cfg, BYTES, corpus, VISION).lines() if "patches" in x]
    assert told.startswith("1 conversations are left out: ")
    assert "data.image_patches=16, those of chats.jsonl:2 32" in told
    with pytest.warns(UserWarning, match=r"those of chats\.jsonl:2 32"):
        iterator(cfg)
    read_lines(tmp_path, record)
    with pytest.raises(ConfigError, match="the training split is empty: 1 conversations are"):
        iterator(cfg)


@pytest.mark.parametrize(
    "record, why",
    [
        ([message("user", image("https://x.y/z.png"), "?")], "'https://x.y/z.png' is no file here"),
        ([message("user", "\ue0f2")], r"private character U\+E0F2"),
        ([message("user", {"type": "image"}, "?")], "part of the type 'image' has no file: write"),
        ([message("user", image(""))], "part of the type 'image' has no file: write its \"path\""),
        ([message("user", {"type": "video"})], "is 'video'; parts that are read .* 'image_url'"),
        ([message("user", {"type": "input_image"})], "is 'input_image'; parts that are read"),
        ([message("user", "?") | {"images": 5}], 'has images=5. Write "images": a list of files'),
        ([message("user", "?") | {"images": ["a"], "image": "b"}], "both `images` and `image`"),
        (
            [message("user", {"type": "image"}, "?") | {"images": ["a", "b"]}],
            "1 of its 2 `images` have no part .* in its message",
        ),
        ([message("user", {"type": "image", "path": 3})], "must be the path of a file, not 3"),
    ],
)
def test_records_that_cannot_be(tmp_path, record, why):
    line = json.dumps({"messages": [*record, message("assistant", "x")]})
    (tmp_path / "chats.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:1: .*{why}"):
        load_corpus(config(tmp_path), "all")


def test_images_of_a_list_take_their_parts_in_turn(tmp_path):
    messages = [message("user", {"type": "image"}, "?"), message("assistant", "x")]
    line = {"messages": messages, "images": ["a.png", {"path": "b.png"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError, match="1 of its 2 `images` have no part"):
        load_corpus(config(tmp_path), "all")
    del line["images"][1]
    (tmp_path / "chats.jsonl").write_text(json.dumps(line))
    (text,) = load_corpus(config(tmp_path), "all").texts
    assert has_marks(text) and str(tmp_path / "a.png") in text


@pytest.mark.parametrize(
    "record, want",
    [
        ({"prompt": "a", "images": "f.png", "completion": "8"}, ["f.png", "a"]),
        ({"prompt": "a", "image": "f.png", "completion": "8"}, ["f.png", "a"]),
        ({"prompt": "a", "image": {"path": "f.png"}, "completion": "8"}, ["f.png", "a"]),
        ({"prompt": "a", "images": None, "completion": "8"}, ["a"]),
        ({"messages": [{"content": "a", "images": ["f.png", "g.png"]}]}, ["f.png", "g.png", "a"]),
        ({"messages": [{"content": [{"type": "text", "text": "a"}], "image": "f.png"}]},
         ["f.png", "a"]),
        ({"messages": [{"content": ["b", {"type": "image"}, "a"], "images": "f.png"}]},
         ["b", "f.png", "a"]),
        ({"messages": [{"content": [{"type": "image"}, "a"]}], "images": "f.png"}, ["f.png", "a"]),
        ({"messages": [{"images": "file:///x/a%20b.png"}]}, ["/x/a b.png"]),
    ],
)  # fmt: skip
def test_an_image_is_never_dropped_whatever_it_stands_under(tmp_path, record, want):
    for one in record.get("messages", []):
        one["role"], content = "user", one.get("content")
        if isinstance(content, list):
            one["content"] = message("user", *content)["content"]
    if "messages" in record:
        record["messages"].append(message("assistant", "x"))
    (found,) = read_lines(tmp_path, record)
    text = found["prompt"] if "prompt" in found else found["messages"][0]["content"]
    parts = [p.file if isinstance(p, ImageRef) else p for p in split_marks(text)]
    assert [p.removeprefix(f"{tmp_path}/") for p in parts] == want


def test_images_beside_messages_need_their_parts(tmp_path):
    messages = [message("user", "?"), message("assistant", "x")]
    with pytest.raises(ConfigError, match=r"chats.jsonl:1: 1 of its 1 `images` have no part"):
        read_lines(tmp_path, {"messages": messages, "images": "f.png"})


def read_lines(folder, *records) -> list[dict]:
    """The records as `load_corpus` has them."""
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    return [json.loads(text) for text in load_corpus(config(folder), "all").texts]


def test_names_may_hold_the_characters_of_marks(tmp_path):
    odd = "\ue0f0\ue0f1\ue0f2\ue0f3\ue0f4%2%"
    (tmp_path / odd).mkdir()
    path = tmp_path / odd / "s.tar"
    shard(path, [(f"{odd}.png", png(8, 8, 0)), ("._a.png", b"x"), (f"{odd}.txt", b"c")])
    (text,) = load_corpus(DataConfig(source="webdataset", paths=(str(path),)), "all").texts
    ref, caption = split_marks(json.loads(text)["prompt"] + "c")
    assert ref.source() == png(8, 8, 0) and (ref.file, ref.name) == (str(path), f"{odd}.png")
    assert caption == "c" and without_marks(ref.mark) == "" and "\\ue0f2" in ref.label


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "null byte", "half a character"])
def test_what_is_no_file_loses_its_own_sample_only(tmp_path, kind, caplog):
    os.mkfifo(tmp_path / "pipe")
    name = {"device": "/dev/zero", "folder": ".", "null byte": "a\0b.png"}.get(kind, kind)
    if kind == "half a character":
        with pytest.raises(ConfigError, match="not valid Unicode"):
            read_lines(tmp_path, {"prompt": "", "image": "\ud800", "completion": "x"})
        return
    (tmp_path / "ok.png").write_bytes(png(8, 8, 0))
    both = [{"prompt": "", "image": file, "completion": "x"} for file in (name, "ok.png")]
    read_lines(tmp_path, *both)
    one = {"validation_paths": (str(tmp_path / "chats.jsonl"),), "batch_size": 1, "epochs": 1}
    batches = iterator(config(tmp_path, **one))
    assert batches.bad_images == 1 and len(list(batches)) == 1
    why = "no file can have this name" if kind == "null byte" else "is no regular file"
    assert why in caplog.text


def test_what_a_run_needs_is_said(folder):
    corpus = load_corpus(config(folder), "train")
    with pytest.raises(ConfigError, match=r"holds the image .*Set data\.image_patches"):
        make_train_iterator(config(folder, image_patches=0), BYTES, corpus, seed=0)
    low = VISION.replace(pad_token=200)
    with pytest.raises(ConfigError, match="pad_token=200 is a token of texts"):
        make_train_iterator(config(folder), BYTES, corpus, seed=0, vision=low)
    with pytest.raises(ConfigError, match=r"<\|media_pad\|> is no token in byte"):
        make_train_iterator(
            config(folder, image_style="kimi_k3"), BYTES, corpus, seed=0, vision=VISION
        )


def test_the_size_of_an_image_is_that_of_the_upright_one():
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    assert (
        image_size(file.getvalue(), "x") == read_image(file.getvalue(), "x").shape[:2] == (30, 10)
    )


def test_boxes_of_two_sizes_share_the_second_evenly():
    rng = np.random.default_rng(0)
    others = np.where(rng.random(300) < 0.5, 4 * rng.integers(1, 5, 300), 0)
    lengths = others // 4 + rng.integers(1, 9, 300)
    boxes = fit_both(lengths, 40, others, 32)
    assert sorted(item for box in boxes for item in box) == list(range(300))
    assert all(lengths[box].sum() <= 40 and others[box].sum() <= 32 for box in boxes)
    shares = np.array([others[box].sum() for box in boxes])
    assert len(boxes) <= 1.1 * max(lengths.sum() / 40, others.sum() / 32)
    assert shares.std() < 0.3 * shares.mean()
    assert IGNORED == -100
