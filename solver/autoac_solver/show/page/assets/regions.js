// Bytes by decision over the regions of the model, and the sums over all of them.

const regionsView = (() => {
  const place = byId("regions");
  const CLASSES = ["save", "recompute", "skip-value"];
  let plan = null;

  /** Bytes, values and seconds by decision, per region and in total. */
  function sums() {
    const { axis, decided, recomputed } = plan;
    const regions = axis.regions.map((name) => ({ name, bytes: [0, 0, 0] }));
    const all = { bytes: [0, 0, 0], values: [0, 0, 0], again: 0 };
    axis.value.group.forEach((group, value) => {
      const bytes = storages.bytes[axis.value.storage[value]];
      const decision = decided[value];
      regions[axis.group.region[group]].bytes[decision] += bytes;
      all.bytes[decision] += bytes;
      all.values[decision] += 1;
    });
    axis.group.timeNs.forEach((time, group) => {
      if (recomputed[group]) all.again += time;
    });
    return { regions, all };
  }

  /** The class of a region's module and the place of its code; "" for several regions, or if unknown. */
  function codeOf(name) {
    const module = modules.indexOf(name.split("#")[0]);
    return module < 0 || !source.sources[module] ? "" : ` (${source.sources[module]})`;
  }

  const inWords = ({ name, bytes }) =>
    `${name || "the model"}${codeOf(name)}: ${source.decisions.map((word, i) => `${word} ${formatBytes(bytes[i])}`).join(", ")}`;

  function renderSums(all) {
    show(byId("sums"), ...source.decisions.map((word, i) =>
      make("div", { "data-decision": word },
        make("dt", {}, swatch(CLASSES[i]), word[0].toUpperCase() + word.slice(1)),
        make("dd", {}, make("strong", { title: exactBytes(all.bytes[i]) }, formatBytes(all.bytes[i])), plural(all.values[i], "value"),
          word === "recompute" && all.again ? `, ${formatSeconds(all.again / 1e9)} to run again` : ""))));
  }

  /** Neighbouring regions are joined if there is not enough room. */
  function joined(regions, count) {
    if (regions.length <= count) return regions;
    return Array.from({ length: count }, (_, i) => {
      const group = regions.slice(Math.floor((i * regions.length) / count), Math.floor(((i + 1) * regions.length) / count));
      return {
        name: `${group[0].name} to ${group.at(-1).name}`,
        bytes: [0, 1, 2].map((decision) => group.reduce((sum, region) => sum + region.bytes[decision], 0)),
      };
    });
  }

  function render() {
    const { regions, all } = sums();
    renderSums(all);
    const { svg, width, height } = canvas(place, 132,
      `Bytes by decision over ${plural(regions.length, "region")}: ` +
      source.decisions.map((word, i) => `${word} ${formatBytes(all.bytes[i])}`).join(", "));
    const [left, right, top, bottom] = [64, width - 4, 8, height - 8];
    const shown = joined(regions, Math.floor((right - left) / 3));
    const highest = Math.max(1, ...shown.map(({ bytes }) => bytes[0] + bytes[1] + bytes[2]));
    const y = linear(0, highest, bottom, top);
    const pitch = (right - left) / Math.max(1, shown.length);
    const gap = Math.min(6, pitch * 0.2);
    svg.append(...valueLines(ticks(0, highest, 2), y, left, right, formatBytes));
    const read = byId("regions-read");
    const what = plan.compiled ? `are compiled (${plan.compiled}) or recompute something` : "recompute something";
    const hint = `${plan.wrapped} of ${plural(plan.regions, "region")} ${what}; the others are left untouched.` +
      (plan.chunked ? " The loss is computed over chunks of rows." : "");
    read.textContent = hint;
    shown.forEach((region, i) => {
      const x = left + i * pitch + gap / 2;
      const column = draw("g", { "data-region": region.name }, draw("title", {}, inWords(region)));
      let low = 0;
      region.bytes.forEach((bytes, decision) => {
        if (!bytes) return;
        column.append(draw("rect", { class: CLASSES[decision], x: round(x), width: Math.max(1, round(pitch - gap)),
          y: round(y(low + bytes)), height: Math.max(0.5, round(y(low) - y(low + bytes))) }));
        low += bytes;
      });
      column.append(draw("rect", { class: "curve-hit", x: left + i * pitch, width: pitch, y: top, height: bottom - top }));
      column.addEventListener("pointerenter", () => {
        read.textContent = inWords(region);
      });
      column.addEventListener("pointerleave", () => {
        read.textContent = hint;
      });
      svg.append(column);
    });
    show(place, svg);
  }

  onWidth(place, render);
  return {
    select(next) {
      plan = next;
      render();
    },
  };
})();
