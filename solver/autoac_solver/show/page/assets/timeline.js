// Memory over the step: layers by kind, a cursor, zoom.
//
// There are more ops than pixels. Each pixel shows the op with the most live bytes in its range, so a peak of a single
// op is visible at any zoom.

const timelineView = (() => {
  const place = byId("timeline");
  const overview = byId("overview");
  const NARROWEST = 8; // ops
  const highest = Math.max(...plans.map((plan) => plan.peak));
  const unplanned = plans.findLast((plan) => !plan.recomputed.includes(1));
  const unplannedTotal = unplanned && memoryOf(unplanned).total;
  const near = (budget, bytes) => budget < bytes * 1.3; // close enough that the axis extends to show its line
  let plan = null;
  let memory = null;
  let from = 0; // first position shown
  let to = 1; // after the last one
  let cursor = 0;
  let resting = true;
  let columns = null;
  let frame = null; // dimensions of the plot
  let moved = () => {};
  const tip = make("div", { class: "tip", hidden: "" });

  /** Per pixel column of the plot: its start, and the position it shows. */
  function bucket(first, end, width) {
    const n = end - first;
    const count = Math.max(1, Math.min(n, Math.floor(width)));
    const edges = new Float64Array(count + 1);
    const shown = new Int32Array(count);
    for (let i = 0; i < count; i += 1) {
      const a = first + Math.floor((i * n) / count);
      const b = Math.max(a + 1, first + Math.floor(((i + 1) * n) / count));
      let best = a;
      for (let position = a + 1; position < b; position += 1) {
        if (memory.total[position] > memory.total[best]) best = position;
      }
      edges[i] = a - first;
      shown[i] = best;
    }
    edges[count] = n;
    return { edges, shown };
  }

  /** The outline between two heights given per column. */
  function band(x, low, high) {
    const count = columns.shown.length;
    let path = `M${x[0]} ${high[0]}`;
    for (let i = 0; i < count; i += 1) path += `V${high[i]}H${x[i + 1]}`;
    for (let i = count - 1; i >= 0; i -= 1) path += `V${low[i]}H${x[i]}`;
    return `${path}Z`;
  }

  function render() {
    const height = place.clientWidth < 560 ? 260 : 340;
    const { svg, width } = canvas(place, height, "");
    svg.removeAttribute("role");
    svg.removeAttribute("aria-label");
    svg.setAttribute("aria-hidden", "true"); // the container is the slider, which describes the position
    const [left, right, top, bottom] = [64, width - 4, 22, height - 40];
    columns = bucket(from, to, right - left);
    const whole = to - from >= plan.axis.length;
    const tallest = whole ? highest : Math.max(...Array.from(columns.shown, (position) => memory.total[position]));
    const capacity = source.device_bytes;
    const lines = [plan.budget, capacity].filter((bytes) => bytes && near(bytes, tallest));
    const topBytes = Math.max(tallest, ...lines) * 1.05;
    const y = linear(0, topBytes, bottom, top);
    const xs = Array.from(columns.edges, (edge) => round(left + (edge / (to - from)) * (right - left)));
    frame = { svg, left, right, top, bottom, y, width, height };

    svg.append(...valueLines(ticks(0, topBytes, 5), y, left, right, formatBytes));
    const dense = (right - left) / columns.shown.length < 2 ? " dense" : "";
    let low = new Array(columns.shown.length).fill(round(bottom));
    const sums = new Float64Array(columns.shown.length);
    kinds.forEach((kind, index) => {
      const column = memory.byKind[index];
      let any = false;
      columns.shown.forEach((position, i) => {
        sums[i] += column[position];
        any ||= column[position] > 0;
      });
      const high = Array.from(sums, (bytes) => round(y(bytes)));
      if (any) svg.append(draw("path", { class: `layer ${kind}${dense}`, "data-kind": kind, d: band(xs, low, high) }));
      low = high;
    });
    phases(svg, xs, bottom);
    if (whole && unplanned && plan !== unplanned) {
      const heights = Array.from(columns.shown, (position) => round(y(unplannedTotal[elsewhere(position)])));
      const d = heights.map((height, i) => `${i ? "V" : `M${xs[0]} `}${height}H${xs[i + 1]}`).join("");
      const highestAt = heights.indexOf(Math.min(...heights));
      svg.append(
        draw("path", { class: "unplanned", id: "unplanned", d }),
        draw("text", { class: "note", x: Math.min(right, xs[highestAt] + 10), y: Math.max(12, heights[highestAt] - 8) }, "with nothing recomputed"),
      );
    }
    if (plan.budget <= topBytes) {
      const line = Math.round(y(plan.budget)) + 0.5;
      svg.append(
        draw("line", { class: "budget-line", id: "budget-line", x1: left, x2: right, y1: line, y2: line }),
        draw("text", { class: "on-picture", x: right, y: line - 6, "text-anchor": "end" }, `budget ${formatBytes(plan.budget)}`),
      );
    }
    if (capacity && capacity <= topBytes) {
      const line = Math.round(y(capacity)) + 0.5;
      svg.append(
        draw("line", { class: "capacity-line", id: "capacity-line", x1: left, x2: right, y1: line, y2: line }),
        draw("text", { class: "note", x: left + 4, y: line - 6 }, `the device has ${formatBytes(capacity)}`),
      );
    }
    if (memory.peakAt >= from && memory.peakAt < to) {
      const px = left + ((memory.peakAt + 0.5 - from) / (to - from)) * (right - left);
      svg.append(draw("circle", { class: "peak-dot", id: "peak-dot", cx: round(px), cy: round(y(plan.peak)), r: 4 }));
    }
    svg.append(draw("line", { class: "cursor", id: "cursor", y1: top, y2: bottom + 8 }));
    svg.append(draw("rect", { class: "brush", id: "brush", y: top, height: bottom - top, width: 0 }));
    show(place, svg, tip);
    renderOverview();
    placeCursor();
  }

  /** The position, with nothing recomputed, of the op at a position, or of the last op before it that every plan runs. */
  function elsewhere(position) {
    let at = position;
    while (at > 0 && plan.axis.again[at]) at -= 1;
    return unplanned.axis.forward.get(plan.axis.op[at]) ?? 0;
  }

  /** The strip under the plot: forward, backward, and the ops that actually run again. */
  function phases(svg, xs, bottom) {
    const phase = Array.from(columns.shown, (position) => describe(plan, memory, position)).map((what) =>
      what.phase === "recompute" && !what.runs ? "backward" : what.phase,
    );
    const spans = { forward: [], backward: [], recompute: [] };
    for (let i = 0; i < phase.length; ) {
      let end = i + 1;
      while (end < phase.length && phase[end] === phase[i]) end += 1;
      spans[phase[i]].push([xs[i], xs[end]]);
      i = end;
    }
    for (const [name, list] of Object.entries(spans)) {
      const d = list.map(([a, b]) => `M${a} ${bottom + 2}H${Math.max(b, a + 1)}V${bottom + 8}H${a}Z`).join("");
      if (d) svg.append(draw("path", { class: `phase-${name}`, d }));
    }
    const backward = [...spans.backward, ...spans.recompute];
    const first = Math.min(...backward.map(([a]) => a));
    const last = Math.max(...backward.map(([, b]) => b));
    const label = (x, words, anchor) => svg.append(draw("text", { x, y: bottom + 24, "text-anchor": anchor }, words));
    if (spans.forward.length) label(spans.forward[0][0], "forward", "start");
    if (backward.length && last - first > 60) {
      label(last, spans.recompute.length ? "backward, recomputation in orange" : "backward", "end");
    }
  }

  /** The overview of the whole step, with a window over the part shown above. */
  function renderOverview() {
    const whole = to - from >= plan.axis.length;
    overview.hidden = whole;
    if (whole) return;
    const { svg, width, height } = canvas(overview, 36, "");
    const { left, right } = frame;
    const n = plan.axis.length;
    const { edges, shown } = bucket(0, n, (right - left) / 2);
    const y = linear(0, highest, height - 2, 2);
    const x = linear(0, n, left, right);
    let d = `M${left} ${height - 2}`;
    shown.forEach((position, i) => {
      d += `V${round(y(memory.total[position]))}H${round(x(edges[i + 1]))}`;
    });
    svg.append(
      draw("path", { class: "overview-shape", d: `${d}V${height - 2}Z` }),
      draw("rect", { class: "overview-window", x: round(x(from)), y: 1, width: Math.max(3, round(x(to) - x(from))), height: height - 2, rx: 2 }),
    );
    show(overview, svg);
  }

  function placeCursor() {
    const { left, right } = frame;
    const inside = cursor >= from && cursor < to;
    const line = byId("cursor");
    const px = Math.round(left + ((cursor + 0.5 - from) / (to - from)) * (right - left)) + 0.5;
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.setAttribute("visibility", inside && !resting ? "visible" : "hidden");
    const what = describe(plan, memory, cursor);
    place.setAttribute("aria-valuemax", plan.axis.length);
    place.setAttribute("aria-valuenow", cursor + 1);
    place.setAttribute("aria-valuetext", `${what.op}, ${what.module}, ${what.words}: ${formatBytes(what.total)} alive`);
    moved(cursor);
  }

  function placeTip() {
    const what = describe(plan, memory, cursor);
    show(tip, make("b", {}, what.op), make("span", {}, `${what.module}, ${what.words}`), make("span", {}, `${formatBytes(what.total)} alive`));
    tip.hidden = false;
    const { left, right } = frame;
    const px = left + ((cursor + 0.5 - from) / (to - from)) * (right - left);
    const beside = px + 14 + tip.offsetWidth <= place.clientWidth ? px + 14 : px - 14 - tip.offsetWidth;
    tip.style.transform = `translate(${Math.max(0, Math.round(beside))}px, ${frame.top}px)`;
  }

  /** Without pointer or focus on the plot, the cursor is at the peak and has no line. */
  function rest() {
    resting = true;
    cursor = memory.peakAt;
    placeCursor();
  }

  const redraw = atNextFrame(render);
  const moveSoon = atNextFrame(() => {
    placeCursor();
    if (!resting) placeTip();
  });

  function zoomTo(first, end) {
    const n = plan.axis.length;
    const span = Math.min(n, Math.max(Math.min(NARROWEST, n), Math.round(end - first)));
    from = Math.min(Math.max(0, Math.round(first)), n - span);
    to = from + span;
    redraw();
  }

  /** Zooms by a factor around a position, which keeps its place. */
  const zoomAbout = (position, factor) => {
    const span = Math.max(NARROWEST, (to - from) * factor);
    const share = (position - from) / (to - from);
    zoomTo(position - share * span, position - share * span + span);
  };

  const pan = (share) => zoomTo(from + share * (to - from), to + share * (to - from));

  function moveTo(position) {
    resting = false;
    cursor = Math.min(Math.max(0, position), plan.axis.length - 1);
    if (cursor < from) zoomTo(cursor, cursor + to - from);
    if (cursor >= to) zoomTo(cursor + 1 - (to - from), cursor + 1);
    moveSoon();
  }

  function toPeak() {
    const span = to - from;
    if (memory.peakAt < from || memory.peakAt >= to) zoomTo(memory.peakAt - span / 2, memory.peakAt + span / 2);
    moveTo(memory.peakAt);
  }

  /** The position shown at an x coordinate. */
  function positionAt(event) {
    const box = place.getBoundingClientRect();
    const share = (event.clientX - box.left - frame.left) / (frame.right - frame.left);
    const column = Math.min(columns.shown.length - 1, Math.max(0, Math.floor(share * columns.shown.length)));
    return columns.shown[column];
  }

  /** Moves along the drawn positions, so that a key press is one pixel if there are more ops than pixels. */
  function step(by) {
    const at = columns.shown.findIndex((position) => position >= cursor);
    const here = at < 0 ? columns.shown.length - 1 : at;
    const next = here + by;
    if (next < 0) moveTo(from - 1);
    else if (next >= columns.shown.length) moveTo(to);
    else moveTo(columns.shown[next]);
  }

  let brushFrom = null;
  place.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    place.focus({ preventScroll: true });
    if (event.pointerType !== "touch") {
      brushFrom = event.clientX;
      place.setPointerCapture(event.pointerId);
    }
    moveTo(positionAt(event));
  });
  place.addEventListener("pointermove", (event) => {
    moveTo(positionAt(event));
    if (brushFrom === null) return;
    const box = place.getBoundingClientRect();
    const clamp = (clientX) => Math.min(Math.max(clientX - box.left, frame.left), frame.right);
    const [a, b] = [clamp(brushFrom), clamp(event.clientX)].sort((p, q) => p - q);
    byId("brush").setAttribute("x", a);
    byId("brush").setAttribute("width", b - a);
  });
  place.addEventListener("pointerup", (event) => {
    if (brushFrom === null) return;
    const width = Math.abs(event.clientX - brushFrom);
    byId("brush").setAttribute("width", 0);
    const box = place.getBoundingClientRect();
    const position = (clientX) => from + ((clientX - box.left - frame.left) / (frame.right - frame.left)) * (to - from);
    if (width > 6) zoomTo(position(Math.min(brushFrom, event.clientX)), position(Math.max(brushFrom, event.clientX)));
    brushFrom = null;
  });
  place.addEventListener("pointercancel", () => {
    brushFrom = null;
  });
  place.addEventListener("pointerleave", () => {
    tip.hidden = true;
    if (document.activeElement !== place && memory) rest();
  });
  place.addEventListener("blur", () => {
    tip.hidden = true;
    rest();
  });
  place.addEventListener("focus", () => {
    if (place.matches(":focus-visible")) moveSoon();
  });
  place.addEventListener("wheel", (event) => {
    // The page scrolls unless the plot has the focus, or for a pinch gesture.
    if (document.activeElement !== place && !event.ctrlKey) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 800);
    else zoomAbout(positionAt(event), Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) * 0.003));
  }, { passive: false });
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const tenth = Math.max(1, Math.round(columns.shown.length / 10));
    const actions = {
      ArrowLeft: () => step(-1),
      ArrowDown: () => step(-1),
      ArrowRight: () => step(1),
      ArrowUp: () => step(1),
      PageUp: () => step(Math.min(tenth, columns.shown.length)),
      PageDown: () => step(-tenth),
      Home: () => moveTo(0),
      End: () => moveTo(plan.axis.length - 1),
      "+": () => zoomAbout(cursor, 0.5),
      "=": () => zoomAbout(cursor, 0.5),
      "-": () => zoomAbout(cursor, 2),
      0: () => zoomTo(0, plan.axis.length),
      Escape: () => zoomTo(0, plan.axis.length),
      p: toPeak,
      P: toPeak,
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });

  const windowTo = (event) => {
    const box = overview.getBoundingClientRect();
    const share = (event.clientX - box.left - frame.left) / (frame.right - frame.left);
    zoomTo(share * plan.axis.length - (to - from) / 2, share * plan.axis.length + (to - from) / 2);
  };
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    windowTo(event);
  });
  overview.addEventListener("pointermove", (event) => {
    if (event.buttons) windowTo(event);
  });

  const buttons = {
    "zoom-in": () => zoomAbout(cursor >= from && cursor < to ? cursor : (from + to) / 2, 0.5),
    "zoom-out": () => zoomAbout((from + to) / 2, 2),
    "pan-left": () => pan(-0.5),
    "pan-right": () => pan(0.5),
    "to-peak": toPeak,
    "zoom-reset": () => zoomTo(0, plan.axis.length),
  };
  for (const [id, run] of Object.entries(buttons)) byId(id).addEventListener("click", run);
  onWidth(place, redraw);

  /** The position on one axis of the op at a position of another. */
  const sameOp = (old, axis, position) => axis.forward.get(old.op[Math.min(position, old.length - 1)]) ?? 0;

  return {
    select(next, nextMemory) {
      if (plan && plan.axis !== next.axis) {
        const whole = to - from >= plan.axis.length;
        const [first, end] = whole ? [0, next.axis.length] : [sameOp(plan.axis, next.axis, from), sameOp(plan.axis, next.axis, to - 1) + 1];
        from = first;
        to = Math.max(end, Math.min(first + NARROWEST, next.axis.length));
      } else if (!plan) {
        to = next.axis.length;
      }
      plan = next;
      memory = nextMemory;
      cursor = memory.peakAt;
      tip.hidden = true;
      resting = true;
      redraw();
    },
    /** Whether the plot of the whole step reaches up to a budget. */
    reaches: (budget) => near(budget, highest),
    onMove(callback) {
      moved = callback;
    },
  };
})();
