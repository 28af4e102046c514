"""The report in a real browser: what is drawn, not what is written.

Needs Chromium (apt-get install chromium).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from PIL import Image
from synthetic_run import PROMPTS, TASKS, write_run

from megadiff.observe.metrics import metric_keys, read_rows
from megadiff.report.pictures import MAX_PROMPTS
from megadiff.report.report import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome found"
)

# Runs before the page's own script, so that it sees every error.
WATCH = """<script>
window.problems = [];
addEventListener(
  "error",
  (event) => problems.push(String(event.message || event.target.outerHTML)),
  true,
);
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
</script>"""
# Looks at the finished page, uses it as a reader does, and leaves what it saw in an attribute.
PROBE = """<script>
addEventListener("load", () => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const box = (node) => node.getBoundingClientRect();
  const seen = { title: document.title, headline: document.querySelector("h1").textContent };
  seen.overflow = document.documentElement.scrollWidth - innerWidth;
  seen.width = innerWidth;
  seen.curves = all(".chart").filter((c) => c.querySelector(".line")).map((chart) => ({
    key: chart.querySelector("code").textContent.split(" ")[0],
    drawn: chart.querySelector(".line").getTotalLength(),
    stroke: getComputedStyle(chart.querySelector(".line")).stroke,
    width: box(chart.querySelector(".area")).width,
    height: box(chart.querySelector(".area")).height,
    ticks: all(".ys span, .xs span", chart).length,
  }));
  seen.bars = all(".stacked rect").filter((rect) => box(rect).height > 0).length;
  seen.whiskers = all(".bars .whisker").map((path) => box(path).width);
  seen.lanes = all(".bars rect").map((rect) => [box(rect).width, box(rect).height]);
  seen.pairs = all(".pair").map((pair) => ({
    marks: all("p", pair).map((mark) => mark.innerText),
    tops: all("img", pair).map((image) => box(image).top),
    shown: all("img", pair).map((image) => [
      image.naturalWidth, box(image).width, getComputedStyle(image).imageRendering,
    ]),
  }));
  seen.images = all(".strip img").map((image) => [image.naturalWidth, box(image).width, image.alt]);
  const area = document.querySelector(".hero .area");
  const middle = { clientX: box(area).left + box(area).width, bubbles: true };
  area.dispatchEvent(new PointerEvent("pointermove", middle));
  seen.tip = document.querySelector(".hero .tip").innerText;
  seen.crosshairs = all(".crosshair.on").length;
  area.dispatchEvent(new PointerEvent("pointerleave"));
  seen.left = all(".crosshair.on, .tip.on").length;
  const press = (key) => area.dispatchEvent(new KeyboardEvent("keydown", { key }));
  area.focus();
  press("End");
  press("ArrowLeft");
  seen.keyed = document.querySelector(".hero .tip").innerText;
  area.blur();
  seen.leftByKey = all(".crosshair.on, .tip.on").length;
  const paper = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  seen.themes = [paper, getComputedStyle(document.body).backgroundColor];
  document.querySelector(".frame").click();
  seen.zoomed = document.querySelector("dialog[open] img").naturalWidth;
  document.querySelector("dialog").click();
  seen.closed = !document.querySelector("dialog[open]");
  document.querySelector("summary").click();
  seen.config = document.querySelector("pre").innerText;
  seen.problems = problems;
  document.documentElement.dataset.probe = JSON.stringify(seen);
});
</script>"""


def browse(page: Path, profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += [
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *arguments,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(
        write_run(tmp_path_factory.mktemp("runs") / "shapes", steps=60, evaluated=True)
    )


def look(
    report: Path, tmp_path: Path, *, width: int, probe: str = PROBE, budget_ms: int = 5000
) -> dict:
    """What the probe saw of the report in a window of this width.

    budget_ms: how long its clock runs.
    """
    html = report.read_text("utf-8")
    page = tmp_path / "probed.html"
    page.write_text(
        html.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{probe}</body>"), "utf-8"
    )
    run = browse(
        page,
        tmp_path / "profile",
        f"--virtual-time-budget={budget_ms}",
        f"--window-size={width},900",
        "--dump-dom",
    )
    assert ":CONSOLE" not in run.stderr, run.stderr
    return json.loads(unescape(re.search(r'data-probe="([^"]*)"', run.stdout)[1]))


@pytest.mark.parametrize(
    "width", [1280, 500]
)  # 500: the narrowest window that headless Chromium makes
def test_the_report_shows_the_run(report: Path, tmp_path: Path, width: int) -> None:
    seen = look(report, tmp_path, width=width)
    assert seen["problems"] == []
    assert seen["width"] == width and seen["overflow"] <= 0
    assert seen["title"] == "shapes · megadiff report"
    assert seen["headline"] == "Held-out accuracy rose from 47.0 % to 76.0 %."

    keys = [
        key
        for key in metric_keys(read_rows(report.with_name("metrics.jsonl")))
        # the figures of one reward are in a table
        if not key.startswith("time/") and not re.match("reward/.*/", key)
    ]
    assert sorted(chart["key"] for chart in seen["curves"]) == keys
    for chart in seen["curves"]:
        assert chart["drawn"] >= 900, chart  # a curve spans its plot, which is 1000 units wide
        assert chart["stroke"] == "rgb(11, 122, 117)", chart
        assert chart["width"] > 150 and chart["height"] > 80 and chart["ticks"] >= 5, chart
    assert seen["bars"] == 60 * 5

    # a row a held-out sample, then best and worst by the one reward whose values differ
    assert len(seen["images"]) == MAX_PROMPTS * 7 + 4
    assert all(natural == 64 and shown > 60 for natural, shown, _ in seen["images"])
    assert {alt.rsplit(", step ", 1)[0] for _, _, alt in seen["images"]} == set(PROMPTS)
    steps = [int(alt.rsplit(" ", 1)[1]) for _, _, alt in seen["images"][:7]]
    assert steps == [0, 10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("width", [1280, 500])
def test_held_out_samples_stand_side_by_side(report: Path, tmp_path: Path, width: int) -> None:
    seen = look(report, tmp_path, width=width)
    assert len(seen["lanes"]) == len(seen["whiskers"]) == 2 * 2 * (1 + len(TASKS))
    assert all(wide > 20 and high > 8 for wide, high in seen["lanes"]) and min(seen["whiskers"]) > 3
    assert len(seen["pairs"]) == 24
    for pair in seen["pairs"]:
        assert set(pair["marks"]) <= {"✓ right", "✗ wrong"} and len(pair["marks"]) == 2
        assert pair["tops"][0] == pair["tops"][1]
        assert all(
            natural == 64 and wide > 60 and look == "pixelated"
            for natural, wide, look in pair["shown"]
        )


def test_the_report_answers_its_reader(report: Path, tmp_path: Path) -> None:
    seen = look(report, tmp_path, width=1280)
    assert seen["tip"].startswith("step 60") and re.search(r"Reward\s*0\.6", seen["tip"])
    assert seen["keyed"].startswith("step 59") and seen["leftByKey"] == 0
    assert seen["crosshairs"] == len(seen["curves"]) + 1 and seen["left"] == 0
    assert seen["themes"] == ["rgb(246, 246, 243)", "rgb(17, 19, 20)"]
    assert seen["zoomed"] == 64 and seen["closed"]
    assert "clip_range: 0.0001" in seen["config"]


# Scrolls to the videos, lets them play, and leaves what it saw.
WATCH_VIDEOS = """<script>
addEventListener("load", async () => {
  const videos = [...document.querySelectorAll(".strip video")];
  // The page's clock jumps ahead while nothing runs, but a decoder needs real time.
  // So every pause also works a little.
  const work = () => {
    let sum = 0;
    for (let turn = 0; turn < 2e7; turn++) sum += turn;
    return sum;
  };
  const pause = (milliseconds) =>
    new Promise((resolve) => setTimeout(() => resolve(work()), milliseconds));
  const seen = { paused: videos.map((video) => video.paused) };
  document.querySelector(".strip").scrollIntoView();
  const moments = videos.map(() => new Set());
  // The best state seen: a video that starts again from its end has no frame for a moment.
  const ready = videos.map(() => 0);
  const played = () =>
    Math.min(...ready) >= 2 && moments.slice(0, 3).every((each) => each.size >= 3);
  for (let turn = 0; turn < 150 && !played(); turn++) {
    await pause(100);
    videos.forEach((video, index) => {
      moments[index].add(video.currentTime);
      ready[index] = Math.max(ready[index], video.readyState);
    });
  }
  seen.moments = moments.map((each) => each.size);
  seen.videos = videos.map((video, index) => ({
    size: [video.videoWidth, video.videoHeight], ready: ready[index], length: video.duration,
    error: video.error ? video.error.message : null,
    shown: video.getBoundingClientRect().width, label: video.ariaLabel,
    loops: video.loop, silent: video.muted,
  }));
  for (let turn = 0; turn < 150 && videos[0].readyState < 2; turn++) await pause(100);
  const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
  canvas.getContext("2d").drawImage(videos[0], 0, 0);
  seen.colours = new Set(canvas.getContext("2d").getImageData(0, 0, 64, 64).data).size;
  videos[0].closest(".frame").click();
  const zoomed = document.querySelector("dialog[open] video");
  const zooms = () => zoomed.videoWidth && zoomed.currentTime;
  for (let turn = 0; turn < 150 && !zooms(); turn++) await pause(100);
  seen.zoomed = [zoomed.videoWidth, zoomed.paused, zoomed.getBoundingClientRect().width];
  document.querySelector("dialog").click();
  const left = () => document.querySelectorAll("dialog video").length;
  for (let turn = 0; turn < 150 && left(); turn++) await pause(100);
  seen.left = left();
  scrollTo(0, 0);
  const away = () => videos.filter((video) => video.getBoundingClientRect().top > innerHeight);
  for (let turn = 0; turn < 150 && !away().every((video) => video.paused); turn++) await pause(100);
  seen.away = away().length;
  seen.playing = away().filter((video) => !video.paused).length;
  seen.problems = problems;
  document.documentElement.dataset.probe = JSON.stringify(seen);
});
</script>"""


def test_videos_play_while_they_are_looked_at(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path / "film", steps=20, num_frames=9))
    seen = look(report, tmp_path, width=1280, probe=WATCH_VIDEOS, budget_ms=60_000)
    assert seen["problems"] == []
    assert len(seen["videos"]) == len(PROMPTS) * 3 + 4 and all(seen["paused"])
    for video in seen["videos"]:
        assert video["error"] is None and video["ready"] >= 2, video
        assert video["size"] == [64, 64] and video["length"] == pytest.approx(9 / 16, abs=0.01), (
            video
        )
        assert video["shown"] > 60 and video["loops"] and video["silent"], video
    assert {video["label"].rsplit(", step ", 1)[0] for video in seen["videos"]} == set(PROMPTS)
    assert min(seen["moments"][:3]) >= 3, seen["moments"]  # the first row is on screen
    assert seen["colours"] > 20
    assert seen["zoomed"][:2] == [64, False] and seen["zoomed"][2] > 300
    assert (seen["left"], seen["playing"]) == (0, 0) and seen["away"] > 0


@pytest.mark.parametrize(
    "scheme, paper", [(1, (246, 246, 243)), (0, (17, 19, 20))], ids=["light", "dark"]
)
def test_the_report_follows_the_readers_colours(
    report: Path, tmp_path: Path, scheme: int, paper: tuple
) -> None:
    shot = tmp_path / "shot.png"
    settings = f"--blink-settings=preferredColorScheme={scheme}"
    browse(
        report, tmp_path / "profile", settings, "--window-size=1280,1600", f"--screenshot={shot}"
    )
    image = Image.open(shot).convert("RGB")
    assert image.getpixel((3, 3)) == paper
    accent = {(11, 122, 117), (60, 200, 189)}
    assert sum(count for count, colour in image.getcolors(1 << 22) if colour in accent) > 500
