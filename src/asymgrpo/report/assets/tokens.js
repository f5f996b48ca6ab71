// The token view: which rollouts are on show, and the controls around them.

const QUANTITIES = {
  entropy: { name: "Entropy", key: "h",
    means: "Entropy in nats of the distribution the token was drawn from: where the policy was undecided." },
  discount: { name: "Discount", key: "d",
    means: "What the horizon leaves of the token's surrogate: 1 is untouched, 0 is gone." },
  ratio: { name: "Ratio", key: "r",
    means: "Probability now over probability when sampled, on a log scale: green fell, pink rose." },
  weight: { name: "Weight", key: "w",
    means: "Factor of the token's log-probability gradient, before the mean over tokens: blue makes it likelier, orange less likely." },
  quadrant: { name: "Quadrant", key: "q",
    means: "Tokens whose ratio left its bounds; a dotted underline marks those without a gradient." },
};
const LAYOUTS = { signs: "positive and negative", grpo: "GRPO and this algorithm" };
const QUADRANTS = { 1: "Q1: A > 0, ratio high", 2: "Q2: A > 0, ratio low", 3: "Q3: A < 0, ratio low", 4: "Q4: A < 0, ratio high" };
const MAX_GROUPS = 12;

const view = { runs: [], run: null, place: 0, group: null, by: "entropy", layout: "signs", query: "", cache: new Map() };

const at = (id) => document.getElementById(id);

// Value of a packed column: one number for all tokens, whole numbers times a power of ten, a list
// of ids or a string of digits; "w" stands for the weight's own.
function columnValue(rollout, key, place) {
  const column = rollout[key] === "w" ? rollout.w : rollout[key];
  if (typeof column === "string") return Number(column[place]);
  if (Array.isArray(column)) return column[place];
  if (column === null || typeof column !== "object") return column;
  const value = column.v[place];
  return value === null ? null : column.e < 0 ? value / 10 ** -column.e : value * 10 ** column.e;
}

function isNegative(rollout) { return rollout.a < 0; }

function stepContent(run, place) {
  const id = `rollouts-${run.block}-${place}`;
  if (!view.cache.has(id)) view.cache.set(id, readJSON(id));
  return view.cache.get(id);
}

function content() { return stepContent(view.run, view.place); }

function groupsOf(page) {
  const groups = new Map();
  for (const rollout of page.rollouts) {
    if (!groups.has(rollout.g)) groups.set(rollout.g, []);
    groups.get(rollout.g).push(rollout);
  }
  return groups;
}

function fullText(rollout) {
  return rollout.text !== undefined ? rollout.text : rollout.t.join("") + (rollout.rest || "");
}

function isFound(rollout, page, needle) {
  return fullText(rollout).toLowerCase().includes(needle) || page.prompts[rollout.p].toLowerCase().includes(needle);
}

function weightSums(rollouts, key) {
  const sums = { up: 0, down: 0, known: false };
  for (const rollout of rollouts) {
    for (let place = 0; place < (rollout.t || []).length; place++) {
      const weight = columnValue(rollout, key, place);
      if (weight === undefined || weight === null) continue;
      sums.known = true;
      sums[weight < 0 ? "down" : "up"] += Math.abs(weight);
    }
  }
  return sums;
}

function showStats() {
  const rollouts = content().rollouts;
  const rewards = rollouts.map((rollout) => rollout.y).filter((reward) => reward !== undefined);
  const own = weightSums(rollouts, "w"), plainGRPO = weightSums(rollouts, "gw");
  const stats = [[`${rollouts.length} rollouts of this step`, ""]];
  if (rewards.length) stats.push(["mean reward ", digits(rewards.reduce((a, b) => a + b, 0) / rewards.length)]);
  if (own.known && own.up + own.down > 0) {
    stats.push(["gradient weight on failed rollouts ", percent(own.down / (own.up + own.down))]);
    if (plainGRPO.known && plainGRPO.up + plainGRPO.down > 0) {
      stats.push(["under GRPO ", percent(plainGRPO.down / (plainGRPO.up + plainGRPO.down))]);
      if (plainGRPO.down > 0) stats.push(["of GRPO's weight on failed rollouts kept ", percent(own.down / plainGRPO.down)]);
    }
  }
  at("token-stats").replaceChildren(...stats.map(([name, value]) =>
    element("span", { class: "muted" }, name, value ? element("b", {}, value) : null)));
}

function showGroups() {
  const page = content();
  const options = [...groupsOf(page)].map(([group, rollouts]) => {
    const failed = rollouts.filter(isNegative).length;
    const text = page.prompts[rollouts[0].p].replace(/\s+/g, " ").trim();
    const option = element("option", { value: String(group) });
    option.textContent = `${group} · +${rollouts.length - failed} −${failed} · ${text.slice(0, 90)}`;
    option.dataset.mixed = failed && failed < rollouts.length ? "yes" : "";
    return option;
  });
  const select = at("token-group");
  select.replaceChildren(...options);
  const kept = options.find((option) => option.value === view.group);
  const chosen = kept || options.find((option) => option.dataset.mixed) || options[0];
  view.group = chosen ? chosen.value : null;
  if (chosen) select.value = chosen.value;
  select.disabled = Boolean(view.query);
}

function showFound(needle) {
  const line = at("token-found");
  line.hidden = !needle;
  if (!needle) return;
  const counts = view.run.steps.map((_, place) => {
    const page = stepContent(view.run, place);
    return page.rollouts.filter((rollout) => isFound(rollout, page, needle)).length;
  });
  const here = counts[view.place];
  const others = counts.map((count, place) => [count, place]).filter(([count, place]) => count && place !== view.place);
  line.replaceChildren(element("b", {}, `${here} rollout${here === 1 ? "" : "s"} in this step`));
  if (others.length) line.append(element("span", { class: "muted" }, "also in step"));
  for (const [count, place] of others.slice(0, 30)) {
    line.append(element("button", { class: "button", type: "button", onclick: () => goTo(place) },
      `${view.run.steps[place]} (${count})`));
  }
}

function showRollouts() {
  const page = content();
  const needle = view.query.toLowerCase();
  const groups = [...groupsOf(page)]
    .map(([group, rollouts]) => [group, needle ? rollouts.filter((rollout) => isFound(rollout, page, needle)) : rollouts])
    .filter(([group, rollouts]) => rollouts.length && (needle || String(group) === view.group));
  const holder = at("token-view");
  hideTip(true);
  holder.className = `by-${view.by}`;
  holder.replaceChildren(...groups.slice(0, MAX_GROUPS).flatMap(([, rollouts]) =>
    groupNodes(page.prompts[rollouts[0].p], rollouts)));
  if (!groups.length) holder.append(element("p", { class: "none muted" }, needle
    ? "Nothing in this step matches the search." : "No rollouts were saved for this step."));
  if (groups.length > MAX_GROUPS) holder.append(element("p", { class: "muted small" },
    `${groups.length - MAX_GROUPS} more prompts match; narrow the search to see them.`));
  showFound(needle);
}

function groupNodes(prompt, rollouts) {
  const head = appendVisible(element("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" },
    element("b", {}, "Prompt")), prompt);
  if (view.layout === "grpo") return [head, ...rollouts.map((rollout) => rolloutCard(rollout, true))];
  const side = (name, title, own) => element("div", { class: `side ${name}` },
    element("h4", {}, title, element("span", { class: "muted small" }, String(own.length))),
    ...(own.length ? own.map((rollout) => rolloutCard(rollout, false))
      : [element("div", { class: "none" }, `No ${name} rollout of this prompt is here.`)]));
  return [head, element("div", { class: "sides" },
    side("positive", "Advantage at or above 0", rollouts.filter((rollout) => !isNegative(rollout))),
    side("negative", "Advantage below 0", rollouts.filter(isNegative)))];
}

function showHeavy() {
  const totals = new Map();
  let all = 0;
  for (const rollout of content().rollouts) {
    (rollout.t || []).forEach((token, place) => {
      const weight = columnValue(rollout, "w", place);
      if (weight === undefined || weight === null) return;
      const key = (weight < 0 ? "-" : "+") + token;
      const total = totals.get(key) || { token, down: weight < 0, sum: 0, count: 0, entropy: 0 };
      total.sum += Math.abs(weight);
      total.count += 1;
      total.entropy += columnValue(rollout, "h", place) || 0;
      totals.set(key, total);
      all += Math.abs(weight);
    });
  }
  const table = (down, title) => {
    const rows = [...totals.values()].filter((total) => total.down === down && total.sum > 0)
      .sort((a, b) => b.sum - a.sum).slice(0, 10);
    return element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ...[title, "times", "share", "mean entropy"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows.map((total) => element("tr", {},
        element("td", {}, appendVisible(element("button", { class: "token", type: "button", title: "Search for it",
          onclick: () => search(total.token) }), total.token.slice(0, 80), true)),
        element("td", {}, String(total.count)), element("td", {}, percent(total.sum / all)),
        element("td", {}, digits(total.entropy / total.count)))))));
  };
  at("token-heavy").hidden = !all;
  at("token-heavy").querySelector(".heavy").replaceChildren(table(false, "made likelier"), table(true, "made less likely"));
}

function ramp(kind, ticks) {
  return element("div", { class: `ramp ${kind}` }, element("i", {}),
    element("span", {}, ...ticks.map((tick) => element("span", {}, tick))));
}

function showLegend() {
  const scales = view.run.scales;
  const parts = [];
  if (view.by === "entropy") parts.push(ramp("entropy", ["0", digits((scales.h || 1) / 2), `≥ ${digits(scales.h || 1)}`]));
  if (view.by === "discount") parts.push(ramp("discount", ["1", "0.5", "0"]));
  if (view.by === "weight") parts.push(ramp("weight", [`≤ −${digits(scales.w || 1)}`, "0", `≥ ${digits(scales.w || 1)}`]));
  if (view.by === "ratio") parts.push(ramp("ratio", [`≤ ${digits(Math.exp(-(scales.r || 1)))}`, "1", `≥ ${digits(Math.exp(scales.r || 1))}`]));
  if (view.by === "quadrant") for (const [number, name] of Object.entries(QUADRANTS)) {
    parts.push(element("span", { class: "box" }, element("i", { class: `i${number}` }), name));
  }
  parts.push(element("span", { class: "means" }, QUANTITIES[view.by].means));
  at("token-legend").replaceChildren(...parts);
}

function showStep() {
  const slider = at("token-step");
  slider.max = String(view.run.steps.length - 1);
  slider.value = String(view.place);
  slider.disabled = view.run.steps.length < 2;
  at("token-step-value").textContent = String(view.run.steps[view.place]);
  slider.setAttribute("aria-valuetext", `step ${view.run.steps[view.place]}`);
  at("step-back").disabled = view.place === 0;
  at("step-on").disabled = view.place === view.run.steps.length - 1;
  showStats();
  showGroups();
  showRollouts();
  showHeavy();
}

function goTo(place) {
  view.place = Math.max(0, Math.min(view.run.steps.length - 1, place));
  showStep();
}

function search(text) {
  at("token-search").value = text;
  view.query = text;
  showGroups();
  showRollouts();
  at("token-search").scrollIntoView({ block: "nearest" });
}

function chooseRun(place) {
  const before = view.run ? view.run.steps[view.place] : Infinity;
  view.run = view.runs[place];
  const near = view.run.steps.map((step) => Math.abs(step - before));
  view.place = before === Infinity ? view.run.steps.length - 1 : near.indexOf(Math.min(...near));
  showControls();
  showLegend();
  showStep();
}

// A quantity that the run's rollouts do not carry cannot be picked.
function showControls() {
  const sample = view.run.steps.flatMap((_, place) => stepContent(view.run, place).rollouts.slice(0, 1));
  const has = (key) => sample.some((rollout) => rollout[key] !== undefined);
  for (const input of document.querySelectorAll("#token-layout input")) input.disabled = input.value === "grpo" && !has("gw");
  if (view.layout === "grpo" && !has("gw")) view.layout = "signs";
  for (const input of document.querySelectorAll("#token-by input")) {
    input.disabled = !has(QUANTITIES[input.value].key) || (view.layout === "grpo" && input.value !== "weight");
  }
  if (view.layout === "grpo") view.by = "weight";
  const usable = [...document.querySelectorAll("#token-by input")].filter((input) => !input.disabled);
  if (usable.length && !usable.some((input) => input.value === view.by)) view.by = usable[0].value;
  for (const input of document.querySelectorAll("#token-by input")) input.checked = input.value === view.by;
  for (const input of document.querySelectorAll("#token-layout input")) input.checked = input.value === view.layout;
}

function segments(id, names, changed) {
  at(id).append(...Object.entries(names).map(([value, name]) => {
    const input = element("input", { type: "radio", name: id, value });
    input.addEventListener("change", () => changed(value));
    return element("label", {}, input, name);
  }));
}

function startTokens(runs) {
  view.runs = runs;
  const select = at("token-run");
  runs.forEach((run, place) => {
    const option = element("option", { value: String(place) });
    option.textContent = run.run === run.label ? run.run : `${run.run} (${run.label})`;
    select.append(option);
  });
  segments("token-by", Object.fromEntries(Object.entries(QUANTITIES).map(([key, { name }]) => [key, name])), (by) => {
    view.by = by; showLegend(); recolour();
  });
  segments("token-layout", LAYOUTS, (layout) => {
    view.layout = layout; showControls(); showLegend(); showRollouts();
  });
  select.addEventListener("change", () => chooseRun(Number(select.value)));
  at("token-group").addEventListener("change", (event) => { view.group = event.target.value; showRollouts(); });
  at("token-step").addEventListener("input", (event) => goTo(Number(event.target.value)));
  at("step-back").addEventListener("click", () => goTo(view.place - 1));
  at("step-on").addEventListener("click", () => goTo(view.place + 1));
  let waiting;
  at("token-search").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { view.query = event.target.value; showGroups(); showRollouts(); }, 120);
  });
  startTips();
  // The baseline comes first and has no discount to show: open on the first run that is not of it.
  const first = Math.max(0, runs.findIndex((run) => run.label !== runs[0].label));
  select.value = String(first);
  chooseRun(first);
}
