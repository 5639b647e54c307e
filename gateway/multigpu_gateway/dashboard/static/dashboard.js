// Charts of the last hour, reports of a training job, and partial outputs of a running task as they come. Everything
// else is HTML and htmx.
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

function options(element, x_axis) {
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  return {
    width: element.clientWidth, height: 140, axes: [{ ...axis, ...x_axis }, { ...axis, size: 70 }],
    legend: { live: false }, cursor: { show: false },
  };
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
  element.plot = new uPlot({
    ...options(element, { values: (_plot, times) => times.map(clock) }),
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

// The reports of a training job: a chart for each metric, by step. A job that has lost steps reports them again.
class Job {
  constructor(element) {
    this.element = element;
    this.metrics = new Map();
    for (const event of JSON.parse(element.dataset.reports)) this.add(event);
  }

  add(event) {
    for (const [name, value] of Object.entries(event?.metrics ?? {})) {
      if (typeof value !== "number") continue;
      if (!this.metrics.has(name)) this.metrics.set(name, { steps: [], values: [] });
      const metric = this.metrics.get(name);
      const step = event.step ?? metric.steps.length;
      while (metric.steps.length && metric.steps.at(-1) >= step) { metric.steps.pop(); metric.values.pop(); }
      metric.steps.push(step);
      metric.values.push(value);
    }
    if (!this.waits) {
      this.waits = true;
      setTimeout(() => { this.waits = false; this.draw(); }, 200);
    }
  }

  draw() {
    for (const [name, metric] of this.metrics) {
      const data = [metric.steps, metric.values];
      if (metric.plot) { metric.plot.setData(data); continue; }
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      const chart = document.createElement("div");
      caption.textContent = name;
      chart.className = "chart";
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", `${name} by step`);
      figure.append(caption, chart);
      this.element.append(figure);
      metric.plot = new uPlot({
        ...options(chart, {}), scales: { x: { time: false } },
        series: [{ label: "step" }, { label: name, stroke: color("--series-1"), width: 2 }],
      }, data, chart);
    }
  }
}

function follow(element, job) {
  const source = new EventSource(element.dataset.events);
  element.textContent = "";
  source.addEventListener("partial", (event) => {
    element.closest("section").hidden = false;
    const value = JSON.parse(event.data);
    const data = "data" in value ? value.data : `${atob(value.data_base64).length.toLocaleString("en")} bytes\n`;
    job?.add(data);
    // As task.py shows them after the task has ended.
    element.textContent += typeof data === "string" ? data : JSON.stringify(data) + "\n";
    element.scrollTop = element.scrollHeight;
  });
  source.addEventListener("outcome", () => source.close());
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
const job = document.getElementById("job");
const reports = job ? new Job(job) : null;
if (stream) follow(stream, reports);
