// The trade-off curve.

const curveView = (() => {
  const place = byId("curve");
  const rows = Array.from(byId("curve-table").tBodies[0].rows);
  const others = plans.filter((plan) => plan !== chosenPlan);
  const shown = others.length ? others : plans;
  const least = Math.min(...plans.map((plan) => plan.budget));
  const most = Math.max(...shown.map((plan) => plan.budget));
  const { by_hand: byHand, greedy, knee_bytes: knee } = source;
  const capacity = source.device_bytes;
  // Close enough that the axis extends to show its line.
  const showsCapacity = capacity > 0.75 * least && capacity < 1.25 * most;
  let selected = chosenPlan;
  let pick = () => {};

  function render() {
    const height = place.clientWidth < 560 ? 240 : 300;
    const words =
      `Extra step time against the budget: ${formatPercent(plans[0].overhead)} at ${formatBytes(plans[0].budget)}, ` +
      `${formatPercent(plans.at(-1).overhead)} at ${formatBytes(plans.at(-1).budget)}; ` +
      `this plan ${formatPercent(chosenPlan.overhead)} at ${formatBytes(chosenPlan.budget)}.`;
    const { svg, width } = canvas(place, height, words);
    const [left, right, top, bottom] = [52, width - 14, 18, height - 44];
    const [first, last] = showsCapacity ? [Math.min(least, capacity), Math.max(most, capacity)] : [least, most];
    const room = (last - first || last) * 0.06;
    const x = linear(Math.max(0, first - room), last + room / 2, left, right);
    const ours = Math.max(0.01, ...plans.map((plan) => plan.overhead));
    const theirs = [...byHand.map((other) => other.overhead), ...greedy.map(([, overhead]) => overhead)];
    const highest = Math.max(ours, ...theirs.filter((overhead) => overhead < 2 * ours)) * 1.08;
    const y = linear(0, highest, bottom, top);
    // A budget far above the step's peak is drawn at the edge.
    const at = (plan) => [Math.min(x(plan.budget), right), y(plan.overhead)];

    if (source.from_the_least) {
      svg.append(draw("rect", { class: "curve-too-small", x: left, y: top, width: Math.max(0, x(least) - left), height: bottom - top }));
      if (x(least) - left > 20) {
        svg.append(draw("text", { transform: `translate(${round((left + x(least)) / 2 + 4)} ${bottom - 10}) rotate(-90)` }, "no plan found"));
      }
    }
    svg.append(...valueLines(ticks(0, highest, 5), y, left, right, (value) => `${digits(100 * value, 3)}%`));
    for (const value of ticks(Math.max(0, first - room), last + room / 2, width / 110)) {
      if (x(value) < left) continue;
      svg.append(draw("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, formatBytes(value)));
      svg.append(draw("line", { class: "axis", x1: Math.round(x(value)), x2: Math.round(x(value)), y1: bottom, y2: bottom + 4 }));
    }
    if (showsCapacity) {
      const at = Math.round(x(capacity)) + 0.5;
      const over = at > (left + right) / 2;
      svg.append(
        draw("line", { class: "capacity-line", id: "capacity", x1: at, x2: at, y1: top, y2: bottom }),
        draw("text", { class: "note", x: at + (over ? -6 : 6), y: top + 2, "text-anchor": over ? "end" : "start" }, `the device has ${formatBytes(capacity)}`),
      );
    }
    svg.append(
      draw("text", { class: "axis-name", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, "budget for the peak"),
      draw("path", { class: "curve-bound", d: stepsBefore(plans.map((plan) => [at(plan)[0], y(plan.bound)])) }),
      draw("path", { class: "curve-line", d: steps(shown.map(at)) }),
    );
    for (const [budget, overhead] of greedy) {
      if (overhead > highest) continue;
      const [px, py] = [round(x(budget)), round(y(overhead))];
      svg.append(draw("path", { class: "curve-greedy", d: `M${px - 4} ${py - 4}L${px + 4} ${py + 4}M${px + 4} ${py - 4}L${px - 4} ${py + 4}` },
        draw("title", {}, `greedy at ${formatBytes(budget)}: +${formatPercent(overhead)}`)));
    }
    for (const { name, peak_bytes: peak, overhead } of byHand) {
      if (overhead > highest || x(peak) > right + 1 || x(peak) < left) continue;
      const [px, py] = [round(x(peak)), round(y(overhead))];
      const over = px > right - 110;
      svg.append(
        draw("path", { class: "curve-hand", d: `M${px - 4.5} ${py - 4.5}h9v9h-9Z` },
          draw("title", {}, `by hand, ${name}: +${formatPercent(overhead)} at ${formatBytes(peak)}`)),
      );
      if (width >= 560) { // on narrow screens only the table has the names
        svg.append(draw("text", { class: "note", x: px + (over ? -2 : 9), y: py - (over ? 12 : 6), "text-anchor": over ? "middle" : "start" }, name));
      }
    }
    if (knee !== null) {
      const plan = plans.find((known) => known.budget === knee);
      if (plan) svg.append(draw("text", { class: "note", id: "knee", x: x(knee), y: Math.min(bottom - 6, y(plan.overhead) + 22), "text-anchor": "middle" }, "knee"));
    }
    const [sx, sy] = at(selected);
    svg.append(draw("line", { class: "curve-drop", x1: sx, x2: sx, y1: sy, y2: bottom }));
    for (const plan of plans) {
      const [px, py] = at(plan);
      svg.append(
        plan === chosenPlan
          ? draw("path", { class: "curve-chosen", d: `M${px} ${py - 7}L${px + 7} ${py}L${px} ${py + 7}L${px - 7} ${py}Z` })
          : draw("circle", { class: "curve-point", cx: px, cy: py, r: 4 }),
      );
    }
    svg.append(draw("circle", { class: "curve-ring", cx: sx, cy: sy, r: 10 }));
    const over = sx > (left + right) / 2;
    svg.append(
      draw("text", { class: "curve-label", id: "curve-selected", x: sx + (over ? -16 : 16), y: Math.max(top + 12, sy - 14), "text-anchor": over ? "end" : "start" },
        `${formatBytes(selected.budget)}, +${formatPercent(selected.overhead)}`),
    );
    for (const plan of plans) {
      const [px, py] = at(plan);
      const hit = draw("circle", { class: "curve-hit", cx: px, cy: py, r: 12, "data-plan": plan.index },
        draw("title", {}, `${formatBytes(plan.budget)}: +${formatPercent(plan.overhead)}, peak ${formatBytes(plan.peak)}`));
      hit.addEventListener("click", () => pick(plan.index));
      svg.append(hit);
    }
    show(place, svg);
    rows.forEach((row, index) => {
      row.classList.toggle("here", index === selected.index);
      if (index === selected.index) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }

  /** A plan is valid up to the next larger budget, a bound down to the next smaller one: steps, not slopes. */
  const steps = (points) => points.map(([px, py], i) => (i ? `H${round(px)}V${round(py)}` : `M${round(px)} ${round(py)}`)).join("");
  const stepsBefore = (points) => points.map(([px, py], i) => (i ? `V${round(py)}H${round(px)}` : `M${round(px)} ${round(py)}`)).join("");

  for (const item of document.querySelectorAll("[data-needs]")) item.hidden = !source[item.dataset.needs].length;
  byId("capacity-words").textContent = capacity
    ? `The device has ${formatBytes(capacity)} of memory${showsCapacity ? ", the upright dotted line" : ""}.`
    : "";
  onWidth(place, render);
  return {
    select(plan) {
      selected = plan;
      render();
    },
    onPick(callback) {
      pick = callback;
    },
  };
})();
