// The table of decisions: one row per value, with sorting, filters, search and paging.

const tableView = (() => {
  const PAGE = 50;
  const natural = new Intl.Collator("en", { numeric: true });

  /** The rank of each string, so that rows are sorted by numbers. */
  function places(strings) {
    const order = strings.map((_, i) => i).sort((a, b) => natural.compare(strings[a], strings[b]));
    const place = new Int32Array(strings.length);
    order.forEach((string, i) => {
      place[string] = i;
    });
    return place;
  }

  const modulePlace = places(modules);
  const namePlace = places(names);
  const lower = { modules: modules.map((text) => text.toLowerCase()), names: names.map((text) => text.toLowerCase()) };
  const MARKS = [
    () => draw("rect", { class: "save", width: 12, height: 12, rx: 3 }),
    () => draw("path", { class: "recompute", d: "M6 0L12 11H0Z" }),
    () => draw("rect", { class: "skip-value", y: 4.5, width: 12, height: 3, rx: 1.5 }),
  ];

  let plan = null;
  let rows = null; // sortable columns, one entry per value
  let earlier = null; // storage -> decision in the chosen plan
  let order = [];
  let page = 0;
  let sorted = { column: "bytes", down: true };
  let wanted = "all";

  const COLUMNS = [
    { id: "order", title: "No.", number: true },
    { id: "module", title: "Module" },
    { id: "op", title: "Op" },
    { id: "region", title: "Region" },
    { id: "bytes", title: "Bytes", number: true, down: true },
    { id: "decision", title: "Decision" },
    { id: "time", title: "To recompute", number: true, down: true },
    { id: "rate", title: "per MB", number: true, down: true },
  ];

  function columnsOf(axis) {
    const n = axis.value.group.length;
    const groupBytes = new Float64Array(axis.group.region.length);
    axis.value.group.forEach((group, value) => {
      groupBytes[group] += storages.bytes[axis.value.storage[value]];
    });
    const made = {
      order: Float64Array.from({ length: n }, (_, value) => value),
      module: new Float64Array(n), op: new Float64Array(n), region: new Float64Array(n), bytes: new Float64Array(n),
      decision: new Float64Array(n), time: new Float64Array(n), rate: new Float64Array(n),
      moduleId: new Int32Array(n), nameId: new Int32Array(n),
    };
    for (let value = 0; value < n; value += 1) {
      const storage = axis.value.storage[value];
      const group = axis.value.group[value];
      const op = storages.op[storage];
      made.moduleId[value] = op < 0 ? 0 : ops.module[op];
      made.nameId[value] = op < 0 ? -1 : ops.name[op];
      made.module[value] = modulePlace[made.moduleId[value]];
      made.op[value] = op < 0 ? -1 : namePlace[made.nameId[value]];
      made.region[value] = axis.group.region[group];
      made.bytes[value] = storages.bytes[storage];
      made.time[value] = axis.group.timeNs[group];
      made.rate[value] = groupBytes[group] ? axis.group.timeNs[group] / groupBytes[group] : 0;
    }
    return made;
  }

  const wasOtherwise = (value) => {
    const before = earlier.get(plan.axis.value.storage[value]);
    return before !== undefined && before !== plan.decided[value];
  };

  function matches() {
    const text = byId("search").value.trim().toLowerCase();
    if (!text) return () => true;
    const inModule = lower.modules.map((name) => name.includes(text));
    const inName = lower.names.map((name) => name.includes(text));
    const inRegion = plan.axis.regions.map((name) => name.toLowerCase().includes(text));
    return (value) => inModule[rows.moduleId[value]] || inName[rows.nameId[value]] || inRegion[rows.region[value]];
  }

  function refresh() {
    const found = matches();
    const counts = { all: 0, save: 0, recompute: 0, skip: 0, changed: 0 };
    order = [];
    let bytes = 0;
    for (let value = 0; value < rows.order.length; value += 1) {
      if (!found(value)) continue;
      const decision = source.decisions[plan.decided[value]];
      const other = wasOtherwise(value);
      counts.all += 1;
      counts[decision] += 1;
      if (other) counts.changed += 1;
      if (wanted === "all" || wanted === decision || (wanted === "changed" && other)) {
        order.push(value);
        bytes += rows.bytes[value];
      }
    }
    const key = rows[sorted.column];
    const sign = sorted.down ? -1 : 1;
    order.sort((a, b) => sign * (key[a] - key[b]) || a - b);
    page = Math.min(page, Math.max(0, Math.ceil(order.length / PAGE) - 1));
    for (const [name, count] of Object.entries(counts)) byId(`count-${name}`).textContent = formatCount(count);
    byId("found").textContent = `${plural(order.length, "value")}, ${formatBytes(bytes)}`;
    renderRows();
  }

  function cells(value) {
    const { axis, decided } = plan;
    const group = axis.value.group[value];
    const decision = decided[value];
    const mark = make("span", { class: "mark" }, draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, MARKS[decision]()), source.decisions[decision]);
    const decisionCell = [mark];
    if (axis.group.mustSave[group]) decisionCell.push(make("span", { class: "aside", title: axis.group.reason[group] }, "no choice"));
    if (wasOtherwise(value)) decisionCell.push(make("span", { class: "aside" }, `this plan: ${source.decisions[earlier.get(axis.value.storage[value])]}`));
    const time = axis.group.mustSave[group] ? "" : formatSeconds(rows.time[value] / 1e9);
    const perMB = rows.rate[value] / 1e9 * 1e6;
    return {
      order: [formatCount(value + 1)],
      module: breakable(modules[rows.moduleId[value]] || "outside of all modules"),
      op: rows.nameId[value] < 0 ? [] : breakable(names[rows.nameId[value]]),
      region: breakable(axis.regions[rows.region[value]] || "the model"),
      bytes: [formatBytes(rows.bytes[value])],
      decision: decisionCell,
      time: time ? [time] : [],
      rate: time && rows.rate[value] ? [formatSeconds(perMB)] : [],
    };
  }

  function renderRows() {
    const shown = order.slice(page * PAGE, (page + 1) * PAGE);
    show(byId("rows"), ...shown.map((value) => {
      const content = cells(value);
      return make("tr", { role: "row" }, ...COLUMNS.map(({ id, number }) =>
        make("td", { role: "cell", title: id === "bytes" ? exactBytes(rows.bytes[value]) : false, class: `col-${id}${number ? " number" : ""}${id === "op" ? " op" : ""}` }, ...content[id])));
    }));
    const pages = Math.max(1, Math.ceil(order.length / PAGE));
    byId("page-number").textContent = order.length
      ? `${formatCount(page * PAGE + 1)} to ${formatCount(page * PAGE + shown.length)} of ${formatCount(order.length)}`
      : "nothing found";
    for (const id of ["first", "previous"]) byId(id).disabled = page === 0;
    for (const id of ["next", "last"]) byId(id).disabled = page >= pages - 1;
  }

  function renderHeads() {
    show(byId("columns"), ...COLUMNS.map((column) => {
      const head = make("th", { role: "columnheader", scope: "col", class: `col-${column.id}${column.number ? " number" : ""}` },
        make("button", { type: "button", "data-column": column.id }, column.title));
      if (sorted.column === column.id) head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      return head;
    }));
  }

  byId("columns").addEventListener("click", (event) => {
    const id = event.target.closest("button")?.dataset.column;
    if (!id) return;
    const column = COLUMNS.find((known) => known.id === id);
    sorted = { column: id, down: sorted.column === id ? !sorted.down : Boolean(column.down) };
    page = 0;
    renderHeads();
    byId("columns").querySelector(`[data-column="${id}"]`).focus();
    refresh();
  });

  const choices = make("div", { class: "choices" });
  for (const [value, words] of [["all", "all"], ...source.decisions.map((word) => [word, word]), ["changed", "other than in this plan"]]) {
    choices.append(make("label", {},
      make("input", { type: "radio", name: "filter", value, checked: value === wanted ? "" : false }), words, make("small", { id: `count-${value}` })));
  }
  byId("filter").append(choices);
  choices.addEventListener("change", (event) => {
    wanted = event.target.value;
    page = 0;
    refresh();
  });
  byId("search").addEventListener("input", atNextFrame(() => {
    page = 0;
    refresh();
  }));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());

  const turn = (to) => {
    page = to();
    renderRows();
  };
  const lastPage = () => Math.max(0, Math.ceil(order.length / PAGE) - 1);
  byId("first").addEventListener("click", () => turn(() => 0));
  byId("previous").addEventListener("click", () => turn(() => Math.max(0, page - 1)));
  byId("next").addEventListener("click", () => turn(() => Math.min(lastPage(), page + 1)));
  byId("last").addEventListener("click", () => turn(lastPage));

  renderHeads();
  return {
    select(next) {
      if (!plan || plan.axis !== next.axis) rows = columnsOf(next.axis);
      earlier ??= new Map(Array.from(chosenPlan.axis.value.storage, (storage, value) => [storage, chosenPlan.decided[value]]));
      plan = next;
      rows.decision = Float64Array.from(plan.decided);
      refresh();
    },
  };
})();
