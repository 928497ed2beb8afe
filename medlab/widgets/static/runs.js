// A list of runs, newest first; a click on one opens its lab below. The kernel reads the run directories; nothing is kept in the notebook.
// Names and texts of runs reach the page through textContent and setAttribute only. life.js, which stands before this, says whether the kernel speaks.
//
// From the kernel:  rows {rows: [{name, recipe, state, step, target, best, loss, bad, line, marks, when}], root, note}, open {name}, compared {names}, beat
// To the kernel:    hello, open {name}, which closes the one that is open; compare {names}, two or more, and none takes the comparison away

const SVG = "http://www.w3.org/2000/svg", ENDLESS = 1e12, TONE = { running: "ok", starting: "brand", paused: "warn", failed: "bad", killed: "bad" };
const COLUMNS = ["run", "recipe", "state", "step", "best", "last loss", "loss", "compare"];

const CSS = `
.medlab-runs { --mr-fg: var(--jp-ui-font-color1, #222); --mr-muted: var(--jp-ui-font-color2, #666); --mr-line: var(--jp-border-color2, #ddd); --mr-soft: var(--jp-layout-color2, #f4f4f4); --mr-brand: #1565c0; --mr-ok: #2e7d32; --mr-warn: #8f5600; --mr-bad: #c62828;
  font: 12px/1.4 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--mr-fg); background: var(--jp-layout-color0, #fff); border: 1px solid var(--mr-line); border-radius: 4px; overflow: auto; max-height: 320px }
body[data-jp-theme-light="false"] .medlab-runs { --mr-brand: #64b5f6; --mr-ok: #7ed492; --mr-warn: #f0b040; --mr-bad: #ff8a80 }
.medlab-runs table { border-collapse: collapse; width: 100%; margin: 0; font-variant-numeric: tabular-nums }
.medlab-runs th { position: sticky; top: 0; background: var(--jp-layout-color0, #fff); color: var(--mr-muted); font-weight: 400; font-size: 11px; text-align: left; padding: 6px 10px 4px; border-bottom: 1px solid var(--mr-line) }
.medlab-runs td { text-align: left; padding: 3px 10px; white-space: nowrap; border: 0 }
.medlab-runs tbody tr { cursor: pointer; background: none }
.medlab-runs tbody tr:hover, .medlab-runs tbody tr[aria-expanded=true] { background: var(--mr-soft) }
.medlab-runs tbody tr[aria-expanded=true] { box-shadow: inset 3px 0 var(--mr-brand) }
.medlab-runs tr:focus-visible { outline: 2px solid var(--mr-brand); outline-offset: -2px }
.medlab-runs .mr-name { font-weight: 600; max-width: 260px; overflow: hidden; text-overflow: ellipsis }
.medlab-runs .mr-number { text-align: right }
.medlab-runs .mr-muted { color: var(--mr-muted) }
.medlab-runs .mr-ok { color: var(--mr-ok) } .medlab-runs .mr-brand { color: var(--mr-brand) } .medlab-runs .mr-warn { color: var(--mr-warn) } .medlab-runs .mr-bad { color: var(--mr-bad) }
.medlab-runs svg { display: block; stroke: currentColor; fill: none; stroke-width: 1.3; stroke-linecap: round; stroke-linejoin: round }
.medlab-runs svg .mr-bad { stroke: var(--mr-bad) }
.medlab-runs .mr-none { padding: 10px; color: var(--mr-muted) }
.medlab-runs input { margin: 0 0 0 16px; vertical-align: middle; accent-color: var(--mr-brand) }
.mr-bar { position: sticky; bottom: 0; display: flex; align-items: center; justify-content: flex-end; gap: 8px; padding: 5px 10px; background: var(--jp-layout-color0, #fff); border-top: 1px solid var(--mr-line); color: var(--mr-muted) }
.mr-bar button { font: inherit; color: var(--mr-fg); background: none; border: 1px solid var(--mr-line); border-radius: 3px; height: 22px; padding: 0 10px; cursor: pointer }
.medlab-runs [hidden] { display: none }`;

function make(tag, name, text) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  return e;
}

const whole = v => v === null ? "–" : Math.round(v).toLocaleString("en-US");

function curve({ line, marks, name }) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [k, v] of [["width", 120], ["height", 22], ["viewBox", "0 0 120 22"], ["role", "img"], ["aria-label", `loss of ${name}`]]) svg.setAttribute(k, v);
  for (const [d, kind] of [[line, ""], [marks, "mr-bad"]]) {
    if (!d) continue;
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d); if (kind) path.setAttribute("class", kind);
    svg.append(path);
  }
  return svg;
}

function view({ model, el, kept }) {
  let rows = [], root = "", note = "", open = null, compared = [];
  const chosen = new Set();
  const box = make("div", "medlab-runs"), style = make("style", "", CSS), table = make("table"), body = make("tbody"), top = make("tr"), none = make("div", "mr-none"), bar = make("div", "mr-bar"), told = make("span"), go = make("button", "", "Compare"), away = make("button", "", "Take away");
  box.setAttribute("role", "group"); box.setAttribute("aria-label", "Runs"); box.dataset.lmSuppressShortcuts = "true";
  box.addEventListener("keydown", e => e.stopPropagation());
  for (const c of COLUMNS) { const th = make("th", ["step", "last loss"].includes(c) ? "mr-number" : "", c); th.scope = "col"; top.append(th) }
  const head = make("thead"); head.append(top); table.append(head, body); bar.append(told, go, away); box.append(table, none, bar); el.append(style, box);

  const ask = name => { try { model.send({ t: "open", name }) } catch { return } };

  const compare = names => { try { model.send({ t: "compare", names }) } catch { return } };
  go.onclick = () => compare(rows.map(r => r.name).filter(n => chosen.has(n)));
  away.onclick = () => { chosen.clear(); compare([]); drawBar(); draw() };

  function drawBar() {  // what is chosen, and what can be done with it
    const n = rows.filter(r => chosen.has(r.name)).length;
    bar.hidden = !n && !compared.length; go.hidden = n < 2; away.hidden = !compared.length;
    told.textContent = n === 1 ? "choose another run to compare it with" : n ? `${n} runs chosen` : "";
  }

  function row(r) {
    const tr = make("tr"), cell = (text, name, title) => { const td = make("td", name, text); if (title) td.title = title; tr.append(td); return td };
    tr.tabIndex = 0; tr.dataset.run = r.name; tr.setAttribute("aria-expanded", r.name === open); tr.setAttribute("aria-label", `Run ${r.name}, ${alive.word(r.state)}: open its lab`);
    tr.onclick = () => ask(r.name);
    tr.onkeydown = e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); ask(r.name) } };
    cell(r.name, "mr-name", r.when); cell(r.recipe, "mr-muted");
    cell(alive.word(r.state), `mr-${alive.dead || alive.silent ? "muted" : TONE[r.state] ?? "muted"}`, alive.why(r.state));
    cell(whole(r.step) + (r.target && r.target < ENDLESS ? ` / ${whole(r.target)}` : ""), "mr-number");
    cell(r.best ?? "–", r.best ? "" : "mr-muted");
    cell(r.loss ?? "–", "mr-number" + (r.bad ? " mr-bad" : ""));
    cell("").append(curve(r));
    const pick = make("input"), last = cell("");
    pick.type = "checkbox"; pick.checked = chosen.has(r.name); pick.setAttribute("aria-label", `Compare run ${r.name}`);
    last.onclick = pick.onkeydown = e => e.stopPropagation();
    pick.onchange = () => { pick.checked ? chosen.add(r.name) : chosen.delete(r.name); drawBar() };
    last.append(pick);
    return tr;
  }

  function draw() {
    const held = document.activeElement?.dataset?.run, within = box.contains(document.activeElement);
    body.replaceChildren(...rows.map(row));
    table.hidden = !rows.length; none.hidden = !!rows.length && !note; none.textContent = note || (root ? `no run below ${root}` : "");
    box.dataset.open = open ?? ""; drawBar();
    if (within && held !== undefined) [...body.children].find(tr => tr.dataset.run === held)?.focus({ preventScroll: true });
  }

  const alive = life(model, draw);
  function heard(m) {
    alive.heard();
    if (m.t === "rows") { rows = m.rows; root = m.root; note = m.note; draw() }
    else if (m.t === "open") { open = m.name; draw() }
    else if (m.t === "compared") { compared = m.names; for (const n of compared) chosen.add(n); box.dataset.compared = compared.join(" "); draw() }
  }
  model.on("msg:custom", heard);
  kept.tell(heard);
  let gone = false;
  alive.insist(() => { try { model.send({ t: "hello" }) } catch { gone = true } }, () => root || gone);  // a kernel that is gone answers nothing
  return () => { model.off("msg:custom", heard); alive.stop() };
}

export default () => {
  const last = new Map(), kept = { keep(m) { last.set(m.t, m) }, tell(heard) { for (const m of last.values()) heard(m) } };
  return {
    initialize({ model }) { model.on("msg:custom", kept.keep) },  // no message passes before this
    render: ({ model, el }) => view({ model, el, kept }),
  };
};
