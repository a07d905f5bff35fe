// Axes of the plots.

/** Round values over [0 or low, high], about n of them. */
function ticks(low, high, n) {
  const rough = (high - low) / Math.max(1, n);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i += 1) values.push(i * step);
  return values;
}

/** A linear map from [low, high] to [from, to]. */
const linear = (low, high, from, to) => {
  const slope = high > low ? (to - from) / (high - low) : 0;
  return (value) => from + (value - low) * slope;
};

const round = (value) => Math.round(value * 10) / 10;

/** An empty plot as wide as its container, with a title for screen readers. */
function canvas(place, height, title) {
  const width = Math.max(240, place.clientWidth);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  return { svg, width, height };
}

/** Horizontal lines with their values at the left. */
function valueLines(values, y, left, right, words) {
  return values.flatMap((value) => [
    draw("line", { class: value === 0 ? "axis" : "grid", x1: left, x2: right, y1: Math.round(y(value)), y2: Math.round(y(value)) }),
    draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, value === 0 ? "0" : words(value)),
  ]);
}

/** Calls back when an element's width changes. */
function onWidth(element, run) {
  let width = element.clientWidth;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    run();
  }).observe(element);
}
