// Live memory: at the cursor beside the timeline, and at the peak in a table.

const readoutView = (() => {
  const inTable = 12;
  const inList = 6;
  const everThere = kinds.map(() => false);
  const elsewhere = {
    Parameter: "the whole model", Buffer: "the whole model", Gradient: "the whole model", Optstate: "the optimizer",
    Input: "the sample, and what else was there", Activation: "outside of all modules",
    Temp: "workspace, and outside of all modules",
  };
  const moduleName = (module, kind) => modules[module] || elsewhere[kinds[kind]];
  let plan = null;
  let memory = null;

  function row(kind, bytes) {
    return make("tr", { "data-kind": kinds[kind] },
      make("th", { scope: "row" }, swatch(kinds[kind]), kinds[kind]), make("td", { title: exactBytes(bytes) }, formatBytes(bytes)));
  }

  function at(position) {
    const what = describe(plan, memory, position);
    byId("read-at").textContent = position === memory.peakAt ? "At the peak" : "At the cursor";
    show(byId("read-op"), ...breakable(what.op));
    show(byId("read-module"), ...breakable(what.module));
    show(byId("read-code"), ...breakable(what.code));
    byId("read-phase").textContent = `${what.words}; op ${formatCount(position + 1)} of ${formatCount(plan.axis.length)}`;
    const rows = kinds.map((_, kind) => row(kind, memory.byKind[kind][position])).filter((_, kind) => everThere[kind]);
    show(byId("read-kinds"), ...rows.reverse()); // in stacking order
    byId("read-total").textContent = formatBytes(what.total);
    byId("read-total").title = exactBytes(what.total);
    const held = aliveAt(plan, position).slice(0, inList);
    show(byId("read-holders"), ...held.map(({ kind, module, bytes }) => {
      const name = moduleName(module, kind);
      return make("li", {}, make("span", { title: name }, swatch(kinds[kind]), name), make("span", { title: exactBytes(bytes) }, formatBytes(bytes)));
    }));
  }

  function bar(bytes, most, kind) {
    return make("span", { class: "bar" },
      make("span", { title: exactBytes(bytes) }, formatBytes(bytes)),
      draw("svg", { "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 10" },
        draw("rect", { class: kind, width: Math.max(0.5, (100 * bytes) / most), height: 10 })));
  }

  /** Modules that differ only in a number of a list, "layers.3.mlp" and "layers.4.mlp", as one row. */
  function alike(held) {
    const groups = new Map();
    for (const { kind, module, bytes } of held) {
      const pattern = modules[module].replace(/(^|\.)\d+(?=\.|#|$)/g, "$1*");
      const key = `${kind} ${pattern}`;
      const group = groups.get(key) ?? { kind, module, pattern, bytes: 0, count: 0 };
      group.bytes += bytes;
      group.count += 1;
      groups.set(key, group);
    }
    return Array.from(groups.values()).sort(
      (a, b) => b.bytes - a.bytes || a.kind - b.kind || (a.pattern < b.pattern ? -1 : 1));
  }

  function holderName({ kind, module, pattern, count }) {
    const name = breakable(count > 1 ? pattern : moduleName(module, kind));
    return count > 1 ? [...name, make("span", { class: "aside" }, plural(count, "module"))] : name;
  }

  function atPeak() {
    const held = alike(aliveAt(plan, memory.peakAt));
    const most = held.length ? held[0].bytes : 1;
    const rows = held.slice(0, inTable).map((group) =>
      make("tr", {},
        make("th", { scope: "row" }, ...holderName(group)),
        make("td", { class: "kind" }, swatch(kinds[group.kind]), kinds[group.kind]),
        make("td", {}, bar(group.bytes, most, kinds[group.kind]))));
    const rest = held.slice(inTable);
    if (rest.length) {
      const bytes = rest.reduce((sum, { bytes: more }) => sum + more, 0);
      rows.push(make("tr", {}, make("th", { scope: "row" }, `and ${formatCount(rest.length)} more`), make("td"),
        make("td", {}, make("span", { class: "bar" }, make("span", { title: exactBytes(bytes) }, formatBytes(bytes))))));
    }
    show(byId("peak-holders"), ...rows);
    const what = describe(plan, memory, memory.peakAt);
    const module = modules[ops.module[plan.axis.op[memory.peakAt]]];
    byId("peak-words").textContent =
      `With a budget of ${formatBytes(plan.budget)} the peak of ${formatBytes(plan.peak)} lies at ${what.op}` + (
        what.op === "optimizer.step" ? ", after backward." :
          ` in ${what.words === "forward" || what.words === "backward" ? what.words : "recomputation"}` +
          `${module ? ` of module ${module}` : ", outside of all modules"}.`
      );
  }

  return {
    select(next, nextMemory) {
      plan = next;
      memory = nextMemory;
      kinds.forEach((_, kind) => {
        everThere[kind] ||= memory.byKind[kind].some((bytes) => bytes > 0);
      });
      at(memory.peakAt);
      atPeak();
    },
    at,
  };
})();
