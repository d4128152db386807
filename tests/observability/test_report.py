"""A report says what was recorded, on one page that nothing in the run can make do anything."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from moejax.config import ConfigError
from moejax.observability import LoadLog, MetricsLog, read_loads, read_metrics, report_plots
from moejax.observability.loads import relative
from moejax.observability.report import DeadExpert, dead_experts, write_report
from moejax.observability.report_plots import Period, draw_experts, recorded

LAYERS = (1, 2, 4)
NASTY = "<script>alert('x')</script>\"&"


def write_run(workdir, steps=60, experts=6, every=10, moe=True):
    """Expert 3 of layer 4 gets its last token in step 34, expert 0 of layer 1 never one."""
    rng = np.random.default_rng(0)
    metrics = MetricsLog(workdir)
    loads = LoadLog(workdir, LAYERS, experts, every=every) if moe else None
    for step in range(1, steps + 1):
        counts = rng.integers(80, 120, (len(LAYERS), experts))
        counts[0, 0] = 0
        counts[2, 3] *= step <= 34
        row = {"loss": 5 - step / 60, "tokens_per_s": 1e3, "lr": 0.1, "tokens": 100 * step}
        if loads is not None:
            loads.add(step, counts)
            row |= {
                "moe_load_max": relative(counts).max(-1), "moe_dropped": [0, 0, 1],
                "moe_rounds": [1, 2, 1], "dead_experts": [int(step > 9), 0, 0],
                "moe_sent_bytes": [2e6, 1e6, 0],
            }  # fmt: skip
        metrics.write(step, row)
    if loads is not None:
        loads.close()
    metrics.close()
    return workdir


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    workdir = write_run(tmp_path_factory.mktemp("run") / NASTY.replace("/", "_"))
    (workdir / "config.json").write_text(json.dumps({"model": {"name": NASTY}}))
    (workdir / "run.json").write_text(json.dumps({"devices": NASTY, "mesh": {NASTY: 2}}))
    return workdir, write_report(workdir, window=20)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_runs_nothing(reported):
    workdir, report = reported
    text = report.page.read_text()
    tags = Tags(text)
    assert report.page == workdir / "report.html"
    names = {tag for tag, _ in tags.found}
    assert not names & {"script", "link", "iframe", "object", "form"} and "img" in names
    for tag, attrs in tags.found:
        assert not any(key.startswith("on") or key == "href" for key in attrs), (tag, attrs)
        if "src" in attrs:
            assert attrs["src"].startswith("data:image/png;base64,")
    assert not re.search(r"https?:", re.sub(r'src="[^"]*"', "", text))
    assert "alert('x')" in tags.text  # the name is there, as text
    (policy,) = (a["content"] for t, a in tags.found if "Content-Security-Policy" in a.values())
    assert policy.startswith("default-src 'none'")


def test_the_pictures_are_the_files_beside_it(reported):
    workdir, report = reported
    names = ["training.png", "experts.png", "balance.png", "exchange.png"]
    assert report.pictures == [workdir / "report" / name for name in names]
    sources = [a["src"] for t, a in Tags(report.page.read_text()).found if t == "img"]
    for path, source in zip(report.pictures, sources, strict=True):
        assert base64.b64decode(source.partition(",")[2]) == path.read_bytes()
        assert min(imread(path).shape[:2]) > 200
    assert sorted(p.name for p in workdir.glob("report*")) == ["report", "report.html"]


def test_dead_experts_are_named(reported):
    workdir, report = reported
    assert report.window == (41, 60)
    assert report.dead == [DeadExpert(1, 0, None), DeadExpert(4, 3, 40)]
    text = Tags(report.page.read_text()).text
    assert "2 experts in 2 layers got no token in steps 41 to 60." in text
    assert dead_experts(read_loads(workdir), 30) == [DeadExpert(1, 0, None)]


def test_only_what_was_recorded_gets_a_panel(reported):
    rows = read_metrics(reported[0])
    titles = ["Rounds of the exchange", "Dropped tokens", "Sent in the exchange"]
    assert [panel.title for panel in recorded(rows)] == titles
    assert recorded([{"step": 1, "moe_dropped": None}]) == []


def test_facts(reported):
    facts = dict(reported[1].facts)
    assert facts["steps"] == "60" and facts["training loss"] == "4.0000"
    assert facts["experts"] == "3 layers x 6" and facts["dead experts"] == "2"
    assert facts["dropped tokens"] == "60" and facts["model"] == NASTY


def test_a_run_without_experts_and_one_still_in_its_first_period(tmp_path):
    report = write_report(write_run(tmp_path / "dense", moe=False, steps=1), tmp_path / "out")
    assert [p.name for p in report.pictures] == ["training.png"] and report.dead is None
    assert report.page == tmp_path / "out" / "report.html"
    assert not (tmp_path / "dense" / "report").exists()


def test_cells_show_the_load_of_their_expert(tmp_path):
    """An idle expert black, an even one near white, a busy one red, in the place they belong."""
    counts = np.full((4, 100), 1000)
    counts[1, 20:30], counts[2, 60:70] = 0, 4000
    image = imread(draw_experts([Period(1, 9, counts)], (3, 4, 5, 6), tmp_path / "x.png"))[..., :3]
    dark = np.argwhere(np.all(image < 0.1, -1) & (np.arange(image.shape[1]) < 1200)[None, :])
    red = np.argwhere((image[..., 0] > 0.3) & (image[..., 1:] < 0.2).all(-1))
    black_rows = np.unique(dark[:, 0])[np.bincount(dark[:, 0])[np.unique(dark[:, 0])] > 60]
    red_rows = np.unique(red[:, 0])[np.bincount(red[:, 0])[np.unique(red[:, 0])] > 60]
    assert len(black_rows) and len(red_rows)
    assert np.median(black_rows) < np.median(red_rows)
    inside = dark[np.isin(dark[:, 0], red_rows[:1] - len(red_rows) // 2)]
    assert np.median(inside[:, 1]) < np.median(red[:, 1])


def test_what_cannot_be_drawn_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        write_report(tmp_path / "none")
    with pytest.raises(ConfigError, match="no metrics at .*metrics.jsonl"):
        write_report(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss"')
    with pytest.raises(ConfigError, match="holds no step yet"):
        write_report(tmp_path)
    for damage in ('{"step": 1, "lo\n{"step": 2}\n', '{"loss": 1}\n', '{"step": "1"}\n', "[]\n"):
        path.write_text(damage)
        with pytest.raises(ConfigError, match="metrics.jsonl, line 1, is damaged"):
            write_report(tmp_path)
    path.write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "expert_loads.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="no file of expert loads"):
        write_report(tmp_path)
    (tmp_path / "expert_loads.jsonl").unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="^--out=.*file cannot be written: it is a file"):
        write_report(tmp_path, tmp_path / "file")
    with pytest.raises(ConfigError, match="^--out=.*inner cannot be written: Not a dir.* --out.$"):
        write_report(tmp_path, tmp_path / "file" / "inner")
    assert not (tmp_path / "report.html").exists() and not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "value",
    ['"loss": "6.2"', '"moe_load_max": "x"', '"moe_load_max": [1.5, "x"]', '"moe_rounds": 3',
     '"lr": 1e999', '"dead_experts": {}', '"tokens": 1' + 400 * "0"],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_value_that_cannot_be_drawn_is_a_damaged_line(tmp_path, value, end):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": 2, {value}}}{end}')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2, is damaged: \w+ is no"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nan_and_words_of_others_are_no_damage(tmp_path):
    rows = [
        {"step": s, "loss": None, "note": "x", "moe_load_max": [None, 9.0], "dead_experts": [],
         "moe_device_load_max": [None, 1.5], "moe_dropped": [None, None]}
        for s in (1, 2)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("config.json", "run.json"):
        (tmp_path / name).write_text('{"model": "x", "train": 3, "mesh": 4}')
    report = write_report(tmp_path)
    assert [p.stem for p in report.pictures] == ["training", "balance", "exchange"]


def test_nothing_is_written_until_all_is_drawn(tmp_path, monkeypatch):
    run, out = write_run(tmp_path / "run", steps=20), tmp_path / "out"
    before = sorted(run.rglob("*"))

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("page", "draw_exchange"):
        monkeypatch.setattr(f"moejax.observability.report.{name}", full)
        with pytest.raises(
            ConfigError, match="^workdir .* cannot be written: No space left.*--out"
        ):
            write_report(run)
        with pytest.raises(ConfigError, match=f"^--out={out} cannot .* Choose another --out.$"):
            write_report(run, out)
        assert sorted(run.rglob("*")) == before and not list(out.iterdir())


@pytest.mark.parametrize("recorded_loads", [True, False])
def test_layers_bear_their_numbers_from_the_top_down(tmp_path, monkeypatch, recorded_loads):
    run = write_run(tmp_path, steps=20)
    if not recorded_loads:
        (run / "expert_loads.jsonl").unlink()
        model = {"num_layers": 5, "ffn": {"num_dense_layers": 2}}
        (run / "config.json").write_text(json.dumps({"model": model}))
    figures, save = {}, report_plots.save_png

    def keep(figure, path):
        figures[path.stem] = figure
        return save(figure, path)

    monkeypatch.setattr(report_plots, "save_png", keep)
    write_report(run)
    assert ("experts" in figures) == recorded_loads
    for name in figures.keys() & {"balance", "experts"}:
        maps = [axes for axes in figures[name].axes if axes.images and axes.get_title(loc="left")]
        assert maps
        for axes in maps:
            assert axes.get_ylabel() == "layer"
            names = ["1", "2", "4"] if recorded_loads else ["2", "3", "4"]
            assert [tick.get_text() for tick in axes.get_yticklabels()] == names
            low, high = axes.get_ylim()
            assert low > high and axes.images[0].origin == "upper"
