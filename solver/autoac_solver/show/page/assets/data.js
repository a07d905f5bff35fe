// The page's data, decoded; its format is in content.py.

/** Decodes a column written by encode() in columns.py. */
function decode(text) {
  const values = [];
  let value = 0;
  if (!text) return values;
  for (const run of text.split(" ")) {
    const star = run.indexOf("*");
    const difference = parseInt(star < 0 ? run : run.slice(0, star), 36);
    const count = star < 0 ? 1 : parseInt(run.slice(star + 1), 36);
    for (let i = 0; i < count; i += 1) values.push((value += difference));
  }
  return values;
}

const source = JSON.parse(byId("data").textContent);
byId("data").remove(); // frees megabytes that are decoded now

const { kinds, modules, names } = source;
const [TEMP, ACTIVATION] = ["Temp", "Activation"].map((kind) => kinds.indexOf(kind));
const RECOMPUTE = source.decisions.indexOf("recompute");

const ops = {
  name: decode(source.ops.name),
  module: decode(source.ops.module),
  backward: decode(source.ops.backward),
};

const sizes = source.storages.sizes_bytes;
const storages = {
  bytes: decode(source.storages.size).map((size) => sizes[size]),
  kind: decode(source.storages.kind),
  holder: decode(source.storages.holder),
  op: decode(source.storages.op),
};

/** The data that plans with the same regions share. */
function decodeAxis(data) {
  const axis = {
    op: decode(data.op),
    again: decode(data.again),
    rerunGroup: decode(data.rerun_group),
    regions: data.regions,
    group: {
      region: decode(data.group_region),
      timeNs: decode(data.group_time_ns),
      mustSave: decode(data.group_must_save),
      reason: decode(data.group_reason).map((reason) => source.reasons[reason]),
    },
    value: { storage: decode(data.value_storage), group: decode(data.value_group) },
    life: { start: decode(data.start), storage: decode(data.storage), bytes: [], keeper: [] },
  };
  const nameless = { bytes: decode(data.nameless_bytes), keeper: decode(data.nameless_keeper) };
  let next = 0;
  axis.life.storage.forEach((storage, life) => {
    axis.life.bytes[life] = storage < 0 ? nameless.bytes[next] : storages.bytes[storage];
    axis.life.keeper[life] = storage < 0 ? nameless.keeper[next] : -1; // the compiled module that keeps it
    if (storage < 0) next += 1;
  });
  axis.length = axis.op.length;
  axis.forward = new Map(); // op -> position of its first run
  axis.op.forEach((op, position) => {
    if (!axis.again[position]) axis.forward.set(op, position);
  });
  return axis;
}

const axes = source.axes.map(decodeAxis);

/** A copy of a column with some places changed. */
function changed(before, { at, to }) {
  const after = before.slice();
  const values = decode(to);
  decode(at).forEach((index, i) => {
    after[index] = values[i];
  });
  return after;
}

/** Decodes the plans, which are stored as changes against the previous plan on their axis. */
function decodePlans() {
  const latest = axes.map((axis) => ({
    lasts: new Int32Array(axis.life.start.length),
    decided: new Uint8Array(axis.value.group.length),
  }));
  return source.plans.map((data, index) => {
    const last = latest[data.axis];
    last.lasts = changed(last.lasts, data.lasts);
    last.decided = changed(last.decided, data.decided);
    return {
      index,
      axis: axes[data.axis],
      budget: data.budget_bytes,
      peak: data.peak_bytes,
      extraS: data.extra_s,
      overhead: source.step_s ? data.extra_s / source.step_s : 0,
      bound: source.step_s ? data.bound_s / source.step_s : 0,
      gap: data.gap,
      status: data.status,
      regions: data.regions,
      wrapped: data.wrapped,
      compiled: data.compiled,
      chunked: data.chunked,
      lasts: last.lasts,
      decided: last.decided,
    };
  });
}

const plans = decodePlans();
const chosenPlan = plans[source.chosen];

function kindOfLife(axis, life) {
  if (axis.life.storage[life] >= 0) return storages.kind[axis.life.storage[life]];
  return axis.life.keeper[life] >= 0 ? ACTIVATION : TEMP;
}

/** Live bytes at every position, by kind and in total. */
function memoryOf(plan) {
  const { axis, lasts } = plan;
  const byKind = kinds.map(() => new Float64Array(axis.length + 1));
  axis.life.start.forEach((start, life) => {
    if (!lasts[life]) return;
    const column = byKind[kindOfLife(axis, life)];
    column[start] += axis.life.bytes[life];
    column[start + lasts[life]] -= axis.life.bytes[life];
  });
  const total = new Float64Array(axis.length);
  let peakAt = 0;
  byKind.forEach((column, kind) => {
    let live = source.resident_bytes[kind];
    for (let position = 0; position < axis.length; position += 1) {
      live += column[position];
      column[position] = live;
      total[position] += live;
    }
  });
  for (let position = 1; position < axis.length; position += 1) {
    if (total[position] > total[peakAt]) peakAt = position;
  }
  return { byKind, total, peakAt };
}

/** Live memory at a position, by kind and module, largest first. */
function aliveAt(plan, position) {
  const { axis, lasts } = plan;
  const held = new Map();
  const add = (kind, module, bytes) => {
    if (!bytes) return;
    const key = kind * modules.length + module;
    held.set(key, (held.get(key) ?? 0) + bytes);
  };
  source.resident_bytes.forEach((bytes, kind) => add(kind, 0, bytes));
  axis.life.start.forEach((start, life) => {
    if (start > position || position >= start + lasts[life]) return;
    const storage = axis.life.storage[life];
    const holder = storage < 0 ? Math.max(0, axis.life.keeper[life]) : storages.holder[storage];
    add(kindOfLife(axis, life), holder, axis.life.bytes[life]);
  });
  return Array.from(held, ([key, bytes]) => ({
    kind: Math.floor(key / modules.length),
    module: key % modules.length,
    bytes,
  })).sort((a, b) => b.bytes - a.bytes || a.kind - b.kind || a.module - b.module);
}

/** Op, module and phase of a position. Replays of values that this plan saves do not run. */
function describe(plan, memory, position) {
  const { axis } = plan;
  const op = axis.op[position];
  const group = axis.rerunGroup[position];
  const runs = group < 0 || plan.recomputed[group];
  const phase = axis.again[position] ? "recompute" : ops.backward[op] ? "backward" : "forward";
  return {
    op: names[ops.name[op]],
    module: modules[ops.module[op]] || "outside of all modules",
    code: source.sources[ops.module[op]],
    phase,
    runs,
    words: phase === "recompute" ? (runs ? "recomputation" : "recomputation, not run: kept in this plan") : phase,
    total: memory.total[position],
  };
}

for (const plan of plans) {
  plan.recomputed = new Uint8Array(plan.axis.group.region.length);
  plan.axis.value.group.forEach((group, value) => {
    if (plan.decided[value] === RECOMPUTE) plan.recomputed[group] = 1;
  });
}
