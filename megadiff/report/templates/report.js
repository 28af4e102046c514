// Crosshair and values under the pointer, shared by all charts; videos; a larger look at a sample; light and dark.
"use strict";

const charts = [...document.querySelectorAll(".chart")].map((figure) => {
  const { steps, ends, series: joined } = JSON.parse(figure.dataset.chart);
  const x = steps.map((step) => (step - ends[0]) / (ends[1] - ends[0]));
  const series = joined.map(([name, texts]) => [name, texts.split("|")]);
  const area = figure.querySelector(".area");
  const now = figure.querySelector(".now");
  const line = area.appendChild(Object.assign(document.createElement("i"), { className: "crosshair" }));
  const tip = area.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  return { figure, steps, x, series, area, now, latest: now?.textContent, line, tip };
});

function nearest(values, target) {
  let best = 0;
  values.forEach((value, index) => {
    if (Math.abs(value - target) < Math.abs(values[best] - target)) best = index;
  });
  return best;
}

function show(chart, index, isPointed) {
  chart.line.style.left = `${chart.x[index] * 100}%`;
  chart.line.classList.add("on");
  if (chart.now) chart.now.textContent = chart.series[0][1][index];
  chart.tip.classList.toggle("on", isPointed);
  if (!isPointed) return;
  chart.tip.replaceChildren(document.createElement("b"));
  chart.tip.firstChild.textContent = `step ${chart.steps[index]}`;
  for (const [name, texts] of chart.series) {
    const row = chart.tip.appendChild(document.createElement("span"));
    row.append(name, Object.assign(document.createElement("em"), { textContent: texts[index] }));
  }
  chart.tip.style.left = `${chart.x[index] * 100}%`;
  chart.tip.classList.toggle("left", chart.x[index] > 0.5);
}

function hide(chart) {
  chart.line.classList.remove("on");
  chart.tip.classList.remove("on");
  if (chart.now) chart.now.textContent = chart.latest;
}

function point(chart, step) {
  for (const other of charts) {
    // A chart that does not reach this step (evaluations are sparse) shows nothing rather than another step.
    const first = other.steps[0], last = other.steps[other.steps.length - 1];
    if (other === chart || (first <= step && step <= last)) show(other, nearest(other.steps, step), other === chart);
    else hide(other);
  }
}

for (const chart of charts) {
  if (!chart.steps.length) continue;
  const last = chart.steps.length - 1;
  let index = last;
  chart.area.addEventListener("pointermove", (event) => {
    const box = chart.area.getBoundingClientRect();
    index = nearest(chart.x, (event.clientX - box.left) / box.width);
    point(chart, chart.steps[index]);
  });
  chart.area.addEventListener("pointerleave", () => charts.forEach(hide));

  // The same by keyboard: Tab to a chart, then the arrow keys.
  chart.area.tabIndex = 0;
  chart.area.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    index = Math.min(last, Math.max(0, moves[event.key]));
    point(chart, chart.steps[index]);
  });
  chart.area.addEventListener("focus", () => point(chart, chart.steps[index]));
  chart.area.addEventListener("blur", () => charts.forEach(hide));
}

const zoom = document.getElementById("zoom");
for (const frame of document.querySelectorAll(".frame")) {
  frame.addEventListener("click", () => {
    const text = Object.assign(document.createElement("p"), { textContent: frame.title });
    const picture = frame.querySelector("img, video").cloneNode();
    zoom.replaceChildren(picture, text);
    zoom.showModal();
    picture.muted = true;
    picture.play?.();
  });
}
zoom.addEventListener("click", () => zoom.close());
zoom.addEventListener("close", () => zoom.replaceChildren());

// Videos play while they are on screen. Whoever asked for less motion sees their first frame, and the video on a click.
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? target.play().catch(() => {}) : target.pause();
  });
  for (const video of document.querySelectorAll(".frame video")) {
    video.muted = true;
    watcher.observe(video);
  }
}

const theme = document.getElementById("theme");
const root = document.documentElement;
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
label();
