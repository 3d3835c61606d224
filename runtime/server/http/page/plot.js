// A graph of what was measured over the last minutes, with scales, and the values under the pointer.
import { h, s } from "./dom.js";
import { ago, agoTicks, short, ticks } from "./scale.js";

const HEIGHT = 190;
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 10, 24];

export class Plot {
  // series: [{name, read(sample)}]; unit: of the scale; most: a fixed end of it; least: the scale never ends below
  constructor({ title, unit, series, most, least = 1, sparse = false, line }) {
    Object.assign(this, { title, unit, series, most, least, sparse, line });
    this.svg = s("svg", { class: "plot", role: "img" });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { class: "card" }, h("figcaption", {}, h("h2", {}, title), this.legend), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw(this.samples, this.span);
    });
    new ResizeObserver(() => this.samples && this.draw(this.samples, this.span)).observe(this.element);
  }

  // samples: oldest first, with `at` in seconds; span: how many seconds are shown
  draw(samples, span) {
    Object.assign(this, { samples, span });
    const width = this.svg.clientWidth || 400;
    const now = samples.at(-1)?.at ?? 0;
    const shown = samples.filter((sample) => sample.at >= now - span - 2);
    const highest = Math.max(
      this.least,
      ...this.series.flatMap(({ read }) => shown.map((sample) => read(sample) ?? 0)),
    );
    const marks = ticks(this.most ?? highest * 1.05);
    const x = (time) => LEFT + (1 - (now - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / marks.at(-1)) * (HEIGHT - TOP - BOTTOM);
    this.place = { x, now, width, shown };
    const grid = marks.map((mark) => [
      s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
      s("text", { x: LEFT - 7, y: y(mark) + 4, "text-anchor": "end" }, short(mark)),
    ]);
    const times = agoTicks(span).map((seconds) =>
      s("text", { x: x(now - seconds), y: HEIGHT - 6, "text-anchor": seconds ? "middle" : "end" }, ago(seconds)),
    );
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(
      ...grid.flat(),
      ...times,
      ...this.limit(y, marks, width),
      ...this.lines(shown, x, y),
      ...this.cursor(y),
    );
    this.drawLegend(this.pointed ?? shown.at(-1));
  }

  limit(y, marks, width) {
    if (!this.line || this.line.value > marks.at(-1)) return [];
    const height = y(this.line.value);
    return [
      s("line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }),
      s("text", { class: "limit", x: width - RIGHT, y: height - 4, "text-anchor": "end" }, this.line.label),
    ];
  }

  lines(shown, x, y) {
    return this.series.flatMap(({ read }, n) => {
      const runs = [[]];
      for (const sample of shown) {
        const value = read(sample);
        if (value !== null) runs.at(-1).push([x(sample.at), y(value)]);
        else if (!this.sparse && runs.at(-1).length) runs.push([]); // what is rare is joined all the same
      }
      return runs.filter((run) => run.length).flatMap((run) => this.run(run, n, y(0)));
    });
  }

  run(points, n, floor) {
    const text = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    const line = s("path", {
      class: `line s${n}`,
      d: `M${text}${points.length === 1 ? `L${points[0][0] + 0.1} ${points[0][1]}` : ""}`,
    });
    if (n || this.sparse || points.length === 1) return [line];
    const area = `M${points[0][0].toFixed(1)} ${floor}L${text}L${points.at(-1)[0].toFixed(1)} ${floor}Z`;
    return [s("path", { class: `area s${n}`, d: area }), line];
  }

  cursor(y) {
    const sample = this.pointed;
    if (!sample) return [];
    const at = this.place.x(sample.at);
    const dots = this.series.map(({ read }, n) =>
      read(sample) === null ? null : s("circle", { class: `dot s${n}`, cx: at, cy: y(read(sample)), r: 3.5 }),
    );
    return [s("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots.filter(Boolean)];
  }

  point(event) {
    if (!this.place?.shown.length) return;
    const position = event.clientX - this.svg.getBoundingClientRect().left;
    const { x, shown } = this.place;
    this.pointed = shown.reduce((best, sample) =>
      Math.abs(x(sample.at) - position) < Math.abs(x(best.at) - position) ? sample : best,
    );
    this.draw(this.samples, this.span);
  }

  drawLegend(sample) {
    const last = (read) => this.samples.findLast((each) => read(each) !== null);
    const values = this.series.map(({ name, read }, n) => {
      const from = this.sparse && !this.pointed ? last(read) : sample;
      const value = from ? read(from) : null;
      return { n, name, text: value === null ? "–" : `${short(value)}${this.unit ? ` ${this.unit}` : ""}` };
    });
    const when = this.pointed ? h("span", { class: "when" }, ago(Math.round(this.place.now - this.pointed.at))) : null;
    this.legend.replaceChildren(
      ...values.map(({ n, name, text }) => h("span", { class: `key s${n}` }, h("i"), `${name} `, h("b", {}, text))),
      ...(when ? [when] : []),
    );
    this.svg.setAttribute(
      "aria-label",
      `${this.title}: ${values.map(({ name, text }) => `${name} ${text}`).join(", ")}`,
    );
  }
}
