// The load of the server: polled once a second while the page is in view, and drawn.
import { json } from "./api.js";
import { duration } from "./chunks.js";
import { at, h } from "./dom.js";
import { Plot } from "./plot.js";
import { between, short } from "./scale.js";

const EVERY_MS = 1000;
const MOST_SAMPLES = 3700;
const SPANS = [60, 120, 300, 600, 900, 1800, 3600]; // seconds
const IDLE_MS = 5000; // between polls while nobody looks

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const TOTALS = [
  ["Output tokens", (f) => short(f.output_tokens)],
  ["Prompt tokens", (f) => short(f.prompt_tokens)],
  ["Of these found in the prefix cache", (f) => share(f.cached_tokens, f.prompt_tokens)],
  ["Mean time to first token", (f) => (f.ttft_count ? duration((1000 * f.ttft_s) / f.ttft_count) : "–")],
  ["Mean time between tokens", (f) => (f.gap_count ? duration((1000 * f.gap_s) / f.gap_count) : "–")],
  ["Steps", (f) => short(f.steps)],
  ["Preemptions", (f) => short(f.preemptions)],
  ["Engine restarts", (f) => short(f.restarts)],
];

export class Load {
  // changed({state, rate, running}): for the bar at the top
  constructor({ about, changed }) {
    this.changed = changed;
    this.samples = [];
    this.visible = false;
    const series = (...pairs) => pairs.map(([name, field]) => ({ name, read: (sample) => sample[field] }));
    const batch = { value: about.max_batch_size, label: "most in a batch" };
    const generates = about.task === "generate";
    this.plots = [
      new Plot({
        title: "Tokens per second",
        unit: "",
        least: 10,
        series: series(...(generates ? [["output", "output"]] : []), ["prompt", "prompt"]),
      }),
      new Plot({
        title: "Requests",
        unit: "",
        least: 4,
        series: series(["running", "running"], ["waiting", "waiting"]),
        line: batch,
      }),
      new Plot({
        title: "KV cache",
        unit: "%",
        most: 100,
        series: series(["in use", "used"], ["free, with a prefix", "cached"]),
      }),
      new Plot({
        title: "Latency",
        unit: "ms",
        least: 10,
        sparse: true,
        series: generates
          ? series(["first token", "first"], ["token to token", "gap"], ["step", "step"])
          : series(["step", "step"]),
      }),
    ];
    at("plots").replaceChildren(...this.plots.map(({ element }) => element));
    at("span").addEventListener("change", () => this.draw());
    document.addEventListener("visibilitychange", () => document.hidden || this.poll());
    this.poll();
  }

  shown() {
    this.visible = true;
    this.draw();
  }

  hidden() {
    this.visible = false;
  }

  async poll() {
    clearTimeout(this.timer);
    try {
      const figures = await json("figures");
      figures.at = performance.now() / 1000;
      const sample = between(this.before, figures);
      if (this.before && figures.at - this.before.at < 0.2) return;
      this.before = figures;
      this.samples.push(sample);
      if (this.samples.length > MOST_SAMPLES) this.samples.shift();
      this.changed({
        state: figures.ready ? "ready" : "not ready",
        rate: sample.output,
        running: sample.running,
        waiting: sample.waiting,
      });
      if (this.visible) this.draw();
    } catch (error) {
      this.changed({ state: error instanceof TypeError ? "no answer" : error.message });
    } finally {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.poll(), document.hidden ? IDLE_MS : EVERY_MS);
    }
  }

  draw() {
    const all = this.samples.length ? this.samples.at(-1).at - this.samples[0].at : 0;
    const span = Number(at("span").value) || SPANS.find((seconds) => seconds >= all) || SPANS.at(-1);
    for (const plot of this.plots) plot.draw(this.samples, span);
    if (!this.before) return;
    at("totals").replaceChildren(
      ...TOTALS.map(([name, read]) => h("div", {}, h("dt", {}, name), h("dd", {}, read(this.before)))),
    );
  }
}
