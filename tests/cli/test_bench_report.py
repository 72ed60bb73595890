"""``kvedge bench report``: one file of several benchmarks. No figure is asserted."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import os
import re
from pathlib import Path

import browser
import numpy as np
import pytest
from browser import needs_browser

from kvedge import system
from kvedge.bench import contest, copies, decode, prefill, threads, whole
from kvedge.bench.report import load_report
from kvedge.cli import main
from kvedge.console import exits

TINY = ("--shape", "4,2,16", "--hot", "--rounds", "2")
RUNS = (
    (threads, (*TINY, "--context", "8", "--threads", "1", "--peers", "none"), ()),
    (decode, (*TINY, "--context", "8", "--peers", "none", "--formats", "int4"), ()),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    found = system.ReadBandwidth(1, 1e10, "native")
    monkeypatch.setattr(system, "read_bandwidth", lambda *args, **options: found)
    rate = system.ProductRate(1, 1e11, "scalar")
    monkeypatch.setattr(system, "product_rate", lambda *args, **options: rate)
    monkeypatch.setattr(copies, "cold_bytes", lambda machine: 1 << 16)
    monkeypatch.setattr(contest, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(whole, "_RUNS", RUNS)


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "report.json"
    assert main(["bench", "report", "--out", str(path)]) == exits.OK
    return path


def test_json_has_each_run_as_save_writes_it(measured):
    report = json.loads(measured.read_text())
    assert [run["benchmark"] for run in report["runs"]] == ["threads", "decode"]
    assert report["machine"]["cpu"] == system.machine().cpu and not report["interrupted"]
    assert all(run["cases"] for run in report["runs"])
    assert report["runs"][0]["command"].startswith("bench threads --shape 4,2,16")


def test_markdown_of_figures_measured_before(measured, tmp_path):
    page = tmp_path / "report.md"
    assert main(["bench", "report", "--from", str(measured), "--out", str(page)]) == exits.OK
    text = page.read_text()
    assert (
        text.startswith("# kvedge ")
        and "| kvedge-int4 |" in text
        and "kvedge bench threads" in text
    )


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_html_is_one_file_with_plots(measured, tmp_path):
    class Page(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.links = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)
            self.links += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    path = tmp_path / "report.html"
    assert main(["bench", "report", "--from", str(measured), "--out", str(path)]) == exits.OK
    page = Page()
    page.feed(path.read_text())
    assert page.tags.count("svg") == 2 and page.tags.count("table") >= 4
    assert page.links == []  # nothing is fetched


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_other_names_are_refused_before_minutes_of_measuring(name, tmp_path, capsys):
    assert main(["bench", "report", "--out", str(tmp_path / name)]) == exits.USAGE
    assert ".html, .md, .json" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_cannot_be_written_is_told_before_minutes_of_measuring(tmp_path, capsys, monkeypatch):
    for module in (decode, prefill):
        monkeypatch.setattr(module, "measure", None)
    os.mkfifo(tmp_path / "run.json")
    os.mkfifo(tmp_path / "run.svg")
    flags = {"report": ["--out", "run.json"], "prefill": ["--save", "run.json"]}
    if importlib.util.find_spec("matplotlib"):
        flags["decode"] = ["--plot", "run.svg"]
    for name, (flag, file) in flags.items():
        assert main(["bench", name, flag, str(tmp_path / file)]) == exits.FAILED
        assert f"{file}: cannot be written: it is a pipe" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.svg"]


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert (
        main(["bench", "decode", *TINY, "--context", "8", "--peers", "none", "--save", str(path)])
        == exits.OK
    )
    code = main(["bench", "report", "--from", str(path), "--out", str(tmp_path / "a.md")])
    assert code not in (exits.OK, exits.USAGE)
    assert "no report of 'kvedge bench report'" in capsys.readouterr().err


def test_a_report_of_another_version_is_refused(measured, tmp_path, capsys):
    report = json.loads(measured.read_text())
    report["runs"][0]["benchmark"] = "push"
    measured.write_text(json.dumps(report))
    page = tmp_path / "report.md"
    assert main(["bench", "report", "--from", str(measured), "--out", str(page)]) == exits.FAILED
    assert "runs of push are of another version" in capsys.readouterr().err and not page.exists()


def test_what_was_measured_before_an_interrupt_is_written(tmp_path, monkeypatch):
    def interrupted(options, output):
        return {**measure(options, output), "interrupted": True}

    measure = threads.measure
    monkeypatch.setattr(threads, "measure", interrupted)
    path = tmp_path / "report.json"
    assert main(["bench", "report", "--out", str(path)]) == exits.INTERRUPTED
    report = json.loads(path.read_text())
    assert len(report["runs"]) == 1 and report["notes"]


# ---- in a browser --------------------------------------------------------------------------------

RECORDED = Path(__file__).parents[2] / "bench" / "runs"

#: Asked of the page by itself: what is as wide as it is drawn, and what lies beyond the window.
PROBE = """<script>
const boxes = [...document.querySelectorAll("svg")].map(e => e.getBoundingClientRect());
const wide = [...document.querySelectorAll("body *:not(svg *)")].filter(
  e => !e.closest(".wide") && e.getBoundingClientRect().right > innerWidth + 1);
document.body.dataset.svgs = boxes.filter(b => b.width > 200 && b.height > 100).length;
document.body.dataset.beyond = wide.map(e => e.tagName).join(" ");
document.body.dataset.scrolls = document.documentElement.scrollWidth > innerWidth;
document.body.dataset.fetched = performance.getEntriesByType("resource").length;
</script>"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The page of runs that were recorded with all peers, as a file."""
    pytest.importorskip("matplotlib")
    runs = [
        load_report(str(RECORDED / f"{name}.json")) for name in ("decode", "prefill", "threads")
    ]
    whole_report = {key: runs[0][key] for key in ("format", "time", "version", "isa", "machine")}
    whole_report |= {"benchmark": "report", "interrupted": False, "notes": [], "runs": runs}
    monkeypatch.setattr(whole, "_RUNS", ((decode, (), ()), (prefill, (), ()), (threads, (), ())))
    source, out = tmp_path / "report.json", tmp_path / "report.html"
    source.write_text(json.dumps(whole_report))
    assert main(["bench", "report", "--from", str(source), "--out", str(out)]) == exits.OK
    return out


@needs_browser
@pytest.mark.subprocess
@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_is_shown_by_a_browser_offline(recorded, tmp_path, width):
    text = recorded.read_text()
    recorded.write_text(text.replace("</body>", f"{PROBE}</body>"))
    shown = browser.document(recorded, tmp_path)
    told = dict(re.findall(r'data-(\w+)="([^"]*)"', shown[shown.index("<body") :].split(">")[0]))
    assert told == {"svgs": "3", "beyond": "", "scrolls": "false", "fetched": "0"}
    for word in ("AMD EPYC", "kvedge bench prefill", "torch", "ggml", "read limit", "GB/s"):
        assert word in shown, word
    picture = browser.screenshot(recorded, tmp_path, width)[..., :3]
    rows = picture.reshape(len(picture), -1)
    drawn = (rows.min(axis=1) < 200).mean()
    assert 0.3 < drawn < 1 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 50
