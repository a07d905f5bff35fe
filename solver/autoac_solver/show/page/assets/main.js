// The budget slider, which drives all other parts.

const slider = byId("budget");
let selectedPlan = null;

function summary(plan) {
  const again = plan.decided.reduce((sum, decision) => sum + (decision === RECOMPUTE ? 1 : 0), 0);
  return [
    ["", formatBytes(plan.budget), plan === chosenPlan ? " (this plan)" : ""],
    ["peak ", formatBytes(plan.peak), ""],
    ["", `+${formatPercent(plan.overhead)}`, " time"],
    ["the optimum is at least ", `+${formatPercent(plan.bound)}`, ""],
    ["", formatCount(again), ` of ${plural(plan.decided.length, "value")} recomputed`],
  ];
}

const announce = whenQuiet(() => {
  byId("announced").textContent = `Budget ${summary(selectedPlan).map((part) => part.join("")).join(", ")}.`;
}, 400);

function select(index) {
  const plan = plans[index];
  if (plan === selectedPlan) return;
  const first = selectedPlan === null;
  selectedPlan = plan;
  slider.value = index;
  slider.setAttribute("aria-valuetext", `${formatBytes(plan.budget)}, ${formatPercent(plan.overhead)} extra time`);
  byId("back").disabled = plan === chosenPlan;
  show(byId("selected"), ...summary(plan).flatMap(([before, strong, after]) => [make("span", {}, before, make("b", {}, strong), make("small", {}, after)), " "]));
  const memory = memoryOf(plan);
  curveView.select(plan);
  timelineView.select(plan, memory);
  readoutView.select(plan, memory);
  regionsView.select(plan);
  tableView.select(plan);
  useView.select(plan);
  byId("timeline-words").textContent =
    `The peak is ${formatBytes(plan.peak)}; the budget of ${formatBytes(plan.budget)} is ` +
    (timelineView.reaches(plan.budget) ? "the dashed line." : "far above it, outside of the picture.");
  if (!first) announce();
}

timelineView.onMove((position) => readoutView.at(position));
curveView.onPick((index) => {
  select(index);
  slider.focus({ preventScroll: true });
});
slider.disabled = plans.length < 2;
slider.addEventListener("input", () => select(Number(slider.value)));
byId("back").addEventListener("click", () => {
  select(chosenPlan.index);
  slider.focus();
});
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
select(chosenPlan.index);
