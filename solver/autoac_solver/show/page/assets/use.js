// Code to train with the plan shown.

const useView = (() => {
  const place = byId("use");
  const copied = byId("copied");
  const { engine, optimizer, policies, headroom_bytes: headroom, budget_of: budgetOf } = source.use;

  function lines(plan) {
    const more = [`budget=${plan.budget}`, `engine="${engine}"`];
    if (plan === chosenPlan && headroom) more.push(`headroom=${headroom}`);
    if (plan === chosenPlan && budgetOf !== "allocated") more.push(`budget_of="${budgetOf}"`); // not the curve's
    if (optimizer) more.push("optimizer=optimizer");
    if (policies) more.push("policies=policies");
    return `plan = autoac.plan(model, sample, ${more.join(", ")})\nplan.apply(model)  # then train as before`;
  }

  function select() {
    const range = document.createRange();
    range.selectNodeContents(place);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  }

  byId("copy").addEventListener("click", async () => {
    let done = false;
    try {
      await navigator.clipboard.writeText(place.textContent);
      done = true;
    } catch { // in a frame, or from a server without TLS
      select();
      done = document.execCommand("copy");
    }
    copied.textContent = done ? "Copied." : "Selected: copy it by keyboard.";
  });

  return {
    select(plan) {
      place.textContent = lines(plan);
      copied.textContent = "";
    },
  };
})();
