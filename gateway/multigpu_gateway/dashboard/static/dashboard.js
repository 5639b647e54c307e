// Charts of the last hour, and partial outputs of a running task as they come. Everything else is HTML and htmx.
"use strict";

const NAMES = {
  succeeded: "succeeded", unsuccessful: "failed, cancelled, expired", wait: "wait", run: "run",
  queued: "waiting", leased: "at workers", power: "W", utilization: "%",
};

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function clock(seconds) {
  return new Date(1000 * seconds).toISOString().slice(11, seconds % 60 ? 19 : 16);
}

function draw(element, history) {
  const names = element.dataset.series.split(" ");
  const data = [history.time, ...names.map((name) => history[name])];
  if (history.time.length < 2) {
    element.textContent = "No data yet: a point comes every ten seconds.";
    return;
  }
  if (!element.plot) element.textContent = "";
  if (element.plot) {
    element.plot.setData(data);
    return;
  }
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  element.plot = new uPlot({
    width: element.clientWidth,
    height: 140,
    axes: [{ ...axis, values: (_plot, times) => times.map(clock) }, { ...axis, size: 70 }],
    legend: { live: false },
    cursor: { show: false },
    scales: { y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    series: [{}, ...names.map((name, index) => ({
      label: NAMES[name], stroke: color(`--series-${index + 1}`), width: 2, points: { show: history.time.length < 5 },
    }))],
  }, data, element);
}

async function drawAll(charts) {
  try {
    const response = await fetch(charts.dataset.source);
    if (response.ok) {
      const history = await response.json();
      for (const element of charts.querySelectorAll(".chart")) draw(element, history);
    }
  } catch (_) { /* the master or the gateway is away: the page says so, and the next round tries again */ }
}

function follow(element) {
  const source = new EventSource(element.dataset.events);
  element.textContent = "";
  source.addEventListener("partial", (event) => {
    element.closest("section").hidden = false;
    const value = JSON.parse(event.data);
    const data = value.data ?? value.data_base64;
    element.textContent += typeof data === "string" ? data : JSON.stringify(data) + "\n";
    element.scrollTop = element.scrollHeight;
  });
  source.addEventListener("outcome", () => { source.close(); location.reload(); });
  source.addEventListener("error", (event) => { if (event.data) source.close(); });
}

const charts = document.getElementById("charts");
if (charts) {
  drawAll(charts);
  setInterval(() => drawAll(charts), 10000);
  addEventListener("resize", () => {
    for (const element of charts.querySelectorAll(".chart")) element.plot?.setSize({ width: element.clientWidth, height: 140 });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const element of charts.querySelectorAll(".chart")) { element.plot?.destroy(); element.plot = null; }
    drawAll(charts);
  });
}
const stream = document.querySelector("[data-events]");
if (stream) follow(stream);
