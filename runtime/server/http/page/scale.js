// Scales of the graphs: round ticks, and numbers in the units that people read.

// About `count` round numbers from 0 to at least `high`: [0, 20, 40, 60].
export function ticks(high, count = 4) {
  const rough = Math.max(high, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const found = [];
  for (let n = 0; ; n++) {
    found.push(Number((n * step).toPrecision(12)));
    if (n * step >= high * 0.999) return found.length > 1 ? found : [0, step];
  }
}

// 1234 -> "1.23k": three digits that count, and no more.
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const [divide, suffix] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const scaled = value / divide;
  const digits = Math.abs(scaled) >= 100 || Number.isInteger(scaled) ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
  return `${Number(scaled.toFixed(digits))}${suffix}`;
}

// Times along the bottom: so many seconds ago, for a span of seconds.
export function agoTicks(span) {
  const step = [5, 10, 15, 30, 60, 120, 300, 600].find((seconds) => span / seconds <= 6) ?? 900;
  const found = [];
  for (let ago = 0; ago <= span; ago += step) found.push(ago);
  return found;
}

export function ago(seconds) {
  if (seconds < 1) return "now";
  return seconds < 120 && seconds % 60 ? `−${seconds} s` : `−${Number((seconds / 60).toFixed(1))} min`;
}

// Figures of two moments -> what is drawn: rates per second and means since the one before; null where there is none.
export function between(before, after) {
  const seconds = before ? after.at - before.at : 0;
  const rate = (name) => (seconds > 0 && after[name] >= before[name] ? (after[name] - before[name]) / seconds : null);
  const mean = (sum, count) => {
    const more = before ? after[count] - before[count] : 0;
    return more > 0 ? (1000 * (after[sum] - before[sum])) / more : null;
  };
  return {
    at: after.at,
    output: rate("output_tokens"),
    prompt: rate("prompt_tokens"),
    running: after.running,
    waiting: after.waiting,
    used: 100 * after.usage,
    cached: after.blocks ? (100 * after.blocks_cached) / after.blocks : 0,
    first: mean("ttft_s", "ttft_count"),
    gap: mean("gap_s", "gap_count"),
    step: mean("step_s", "step_count"),
  };
}
