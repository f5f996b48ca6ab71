// One rollout on the token view: its head, its profile, its tokens, and the numbers of a token.

const CHUNK = 1500;
const painted = { holders: [], pinned: null };

function rolloutCard(rollout, beside) {
  const negative = isNegative(rollout);
  const facts = [["rollout", String(rollout.i ?? "–")], ["reward", digits(rollout.y)], ["advantage", signed(rollout.a ?? null)]];
  if (rollout.n !== undefined) facts.push(["tokens", rollout.n.toLocaleString("en")]);
  if (rollout.kl !== undefined) facts.push(["KL", digits(rollout.kl)]);
  const kept = keptShare(rollout);
  if (kept !== null) facts.push(["kept of GRPO's weight", percent(kept)]);
  const head = element("header", {}, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, value))));
  if (rollout.cut) head.append(element("span", { class: "badge inconclusive" }, "cut off"));
  const card = element("article", { class: `card ${negative ? "negative" : "positive"}` }, head);
  const strip = profile(rollout);
  if (strip) card.append(strip);
  if (beside && rollout.gw !== undefined) {
    card.append(element("div", { class: "pair" },
      element("div", {}, element("h5", {}, "GRPO's weight"), tokenText(rollout, "gw")),
      element("div", {}, element("h5", {}, `${view.run.label}'s weight`), tokenText(rollout, "w"))));
  } else {
    card.append(tokenText(rollout, "w"));
  }
  return card;
}

function keptShare(rollout) {
  const own = weightSums([rollout], "w"), plainGRPO = weightSums([rollout], "gw");
  const whole = plainGRPO.up + plainGRPO.down;
  return own.known && plainGRPO.known && whole > 0 ? (own.up + own.down) / whole : null;
}

// The size of the weight along the rollout: bars for the algorithm, a line for GRPO.
function profile(rollout) {
  const count = (rollout.t || []).length;
  const sizes = (key) => Array.from({ length: count }, (_, place) => Math.abs(columnValue(rollout, key, place) ?? 0));
  if (count < 2 || rollout.w === undefined) return null;
  const own = sizes("w"), plainGRPO = rollout.gw === undefined ? [] : sizes("gw");
  const top = Math.max(...own, ...plainGRPO);
  if (!(top > 0)) return null;
  const height = (size) => (32 - 28 * size / top).toFixed(1);
  const picture = svg("svg", { class: "profile", viewBox: `0 0 ${count} 34`, preserveAspectRatio: "none", role: "img",
    "aria-label": "Size of the gradient weight along the rollout, bars; GRPO's, line" });
  picture.append(svg("path", { class: "own", d: own.map((size, place) => `M${place} 34V${height(size)}h.85V34z`).join("") }));
  if (plainGRPO.length) picture.append(svg("path", { class: "plain",
    d: plainGRPO.map((size, place) => `${place ? "L" : "M"}${place} ${height(size)}H${place + 1}`).join("") }));
  const title = svg("title");
  title.textContent = "Size of the gradient weight along the rollout; the grey line is GRPO's";
  picture.append(title);
  return picture;
}

function tokenText(rollout, key) {
  const text = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-describedby": "tip",
    "aria-label": `Completion of rollout ${rollout.i}, tokens; arrow keys walk through them` });
  const holder = element("div", {}, text);
  if (rollout.text !== undefined) {
    appendVisible(text, rollout.text);
    return holder;
  }
  const record = { node: text, rollout, key, shown: 0, hits: hitPlaces(rollout) };
  painted.holders.push(record);
  text.record = record;
  appendChunk(record);
  if (record.shown < rollout.t.length || rollout.rest) {
    const more = element("button", { class: "button more", type: "button" });
    const label = () => { more.textContent = `Show more (${record.shown.toLocaleString("en")} of ${rollout.n.toLocaleString("en")} tokens shown)`; };
    label();
    more.addEventListener("click", () => {
      if (record.shown < rollout.t.length) appendChunk(record);
      else { text.append(appendVisible(element("span", { class: "plain-rest" }), rollout.rest)); more.remove(); return; }
      if (record.shown >= rollout.t.length && !rollout.rest) more.remove();
      label();
    });
    holder.append(more);
  }
  return holder;
}

function appendChunk(record) {
  const end = Math.min(record.rollout.t.length, record.shown + CHUNK);
  const nodes = document.createDocumentFragment();
  for (let place = record.shown; place < end; place++) {
    const node = appendVisible(element("span", { class: "tok" }), record.rollout.t[place]);
    node.dataset.i = String(place);
    paint(node, record, place);
    nodes.append(node);
  }
  record.node.append(nodes);
  record.shown = end;
}

// Tokens that a match of the search touches.
function hitPlaces(rollout) {
  const hits = new Set();
  const needle = view.query.toLowerCase();
  if (!needle) return hits;
  const starts = [];
  let text = "";
  for (const token of rollout.t) { starts.push(text.length); text += token; }
  const lower = text.toLowerCase();
  let place = 0;
  for (let from = lower.indexOf(needle); from >= 0; from = lower.indexOf(needle, from + 1)) {
    while (place + 1 < starts.length && starts[place + 1] <= from) place++;
    for (let touched = place; touched < starts.length && starts[touched] < from + needle.length; touched++) hits.add(touched);
  }
  return hits;
}

function paint(node, record, place) {
  const { rollout } = record;
  const quadrant = columnValue(rollout, "q", place);
  const strength = strengthOf(rollout, place, record.key);
  node.className = "tok" + (strength.side || "") + (columnValue(rollout, "c", place) ? " clipped" : "") +
    (record.hits.has(place) ? " hit" : "") + (rollout.t[place].includes("\n") ? " line" : "");
  node.style.setProperty("--v", strength.size.toFixed(3));
  if (quadrant) node.dataset.q = String(quadrant);
}

// How far a token's background goes from none (0) to full (1), and to which side.
function strengthOf(rollout, place, weightKey) {
  const scales = view.run.scales;
  const value = columnValue(rollout, view.by === "weight" ? weightKey : QUANTITIES[view.by].key, place);
  if (value === undefined || value === null) return { size: 0 };
  if (view.by === "quadrant") return { size: value ? 1 : 0 };
  const cap = (share) => Math.max(0, Math.min(1, share));
  if (view.by === "entropy") return { size: cap(value / (scales.h || 1)) };
  if (view.by === "discount") return { size: cap(1 - value) };
  if (view.by === "weight") return { size: cap(Math.abs(value) / (scales.w || 1)), side: value < 0 ? " down" : " up" };
  if (view.by === "ratio" && value > 0) {
    return { size: cap(Math.abs(Math.log(value)) / (scales.r || 1)), side: value < 1 ? " down" : " up" };
  }
  return { size: 0 };
}

function recolour() {
  at("token-view").className = `by-${view.by}`;
  painted.holders = painted.holders.filter((record) => record.node.isConnected);
  for (const record of painted.holders) {
    for (const node of record.node.querySelectorAll(".tok")) paint(node, record, Number(node.dataset.i));
  }
}

// the numbers of a token

function tokenFacts(rollout, place) {
  const value = (key) => columnValue(rollout, key, place);
  const known = (number) => number !== undefined && number !== null;
  const facts = [["position", `${place + 1} of ${rollout.n}`]];
  if (known(value("id"))) facts.push(["token id", String(value("id"))]);
  if (known(value("lp"))) facts.push(["probability", `${percent(Math.exp(value("lp")))} (log ${digits(value("lp"))})`]);
  if (known(value("h"))) facts.push(["entropy", `${digits(value("h"))} nats`, "entropy"]);
  if (known(value("d"))) facts.push(["discount", digits(value("d")), "discount"]);
  if (known(value("r"))) facts.push(["ratio", digits(value("r"), 4), "ratio"]);
  if (known(value("w"))) facts.push(["weight", signed(value("w")), "weight"]);
  if (known(value("gw"))) facts.push(["GRPO's weight", signed(value("gw"))]);
  if (known(value("w")) && value("gw")) facts.push(["kept of GRPO's", percent(value("w") / value("gw"))]);
  const quadrant = value("q");
  if (known(quadrant)) facts.push(["quadrant", quadrant ? QUADRANTS[quadrant] : "inside its bounds", "quadrant"]);
  if (value("c")) facts.push(["clipped", "yes, no gradient"]);
  return facts;
}

function showTip(node) {
  const record = node.parentElement.record;
  const place = Number(node.dataset.i);
  const rows = tokenFacts(record.rollout, place).flatMap(([name, value, by]) => {
    const kind = by === view.by ? "now" : "";
    return [element("dt", { class: kind }, name), element("dd", { class: kind }, value)];
  });
  const tip = at("tip");
  const what = appendVisible(element("span", { class: "what" }), record.rollout.t[place].slice(0, 400), true);
  tip.replaceChildren(what, element("dl", {}, ...rows));
  tip.hidden = false;
  document.querySelector(".tok.current")?.classList.remove("current");
  node.classList.add("current");
  placeTip(node);
}

function placeTip(node) {
  const tip = at("tip");
  const box = node.getClientRects()[0] || node.getBoundingClientRect();
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
  const below = box.bottom + 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + height > innerHeight && box.top > height + 8 ? box.top - height - 8 : below}px`;
}

function hideTip(force = false) {
  if (painted.pinned && !force) return;
  painted.pinned = null;
  at("tip").hidden = true;
  document.querySelector(".tok.current")?.classList.remove("current");
}

// The page scrolls under the numbers, also when the arrow keys bring a token into view.
function followToken() {
  const node = document.querySelector(".tok.current");
  if (!node) return;
  const box = node.getBoundingClientRect();
  if (box.bottom < 0 || box.top > innerHeight) hideTip(true);
  else placeTip(node);
}

function walk(event) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  if (event.key === "Escape") hideTip(true);
  if (!(event.key in moves) || !event.target.record) return;
  const tokens = event.target.querySelectorAll(".tok");
  const now = [...tokens].findIndex((node) => node.classList.contains("current"));
  const next = Math.max(0, Math.min(tokens.length - 1, (now < 0 ? -1 : now) + moves[event.key]));
  event.preventDefault();
  tokens[next].scrollIntoView({ block: "nearest" });
  showTip(tokens[next]);
}

function startTips() {
  const holder = at("token-view");
  const token = (event) => event.target.closest?.(".tok");
  holder.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && !painted.pinned && token(event)) showTip(token(event));
  });
  holder.addEventListener("pointerout", (event) => {
    if (event.pointerType === "mouse" && token(event)) hideTip();
  });
  document.addEventListener("click", (event) => {
    const node = token(event);
    const again = node && painted.pinned === node;
    hideTip(true);
    if (node && !again) { showTip(node); painted.pinned = node; }
  });
  holder.addEventListener("keydown", walk);
  holder.addEventListener("focusin", (event) => {
    const first = event.target.record && event.target.matches(":focus-visible") && event.target.querySelector(".tok");
    if (first) showTip(first);
  });
  holder.addEventListener("focusout", () => hideTip());
  addEventListener("scroll", followToken, { passive: true });
}
