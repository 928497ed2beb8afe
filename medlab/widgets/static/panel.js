// The panel of a run: state, buttons, errors, fixes, knobs, log. The kernel reads it all from the run directory; nothing is kept in the notebook.
// Names and texts of runs reach the page through textContent, title and aria-label only. life.js, which stands before this, says whether the kernel speaks.
//
// From the kernel:  spec {name, controls: {knobs: {name: description}, fixes: [{name, on, off, claim, measured, concern}]} | null}
//                   head {state, step, target, loss, rate, mem, gpu, scale, skipped, row, device, precision}
//                   can {buttons: {name: why not, or ""}, doing}, values {values, all}, changes {changes, all}, log {lines, all, more}
//                   checkpoints {rows: [[step, time, bytes]]}, trouble {items: [{key, title, text, facts, trace, level, dismiss}]}, answer {request, ok, text}, beat
//                   proofs: see proofs.js, which stands before this. It speaks when it is made and when it is displayed, before the page has a view, and hears no page while a cell runs.
// To the kernel:    hello, set {knobs, request}, fix {name, on, request}, do {name, until, step, request}, older, dismiss {key}

const OPEN = ["learning rate", "numerics"], ENDLESS = 1e12, PER_DECADE = 20, MOST = 2000;
const TONE = { running: "ok", starting: "brand", paused: "warn", failed: "bad", killed: "bad" }, ASKED_AGAIN = /asked for again/;
const BUTTONS = [["start", "Start"], ["pause", "Pause"], ["stop", "Stop"], ["save", "Save"], ["restore", "Restore"]];

const CSS = `
.medlab-panel { --mp-bg: var(--jp-layout-color0, #fff); --mp-soft: var(--jp-layout-color2, #f4f4f4); --mp-fg: var(--jp-ui-font-color1, #222); --mp-muted: var(--jp-ui-font-color2, #666); --mp-line: var(--jp-border-color2, #ddd);
  --mp-edge: var(--jp-border-color1, #bbb); --mp-brand: #1565c0; --mp-on: #fff; --mp-ok: #2e7d32; --mp-warn: #8f5600; --mp-bad: #c62828;
  box-sizing: border-box; width: min(100%, var(--medlab-panel-width, 440px)); max-width: 520px; container-type: inline-size; font: 12px/1.45 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--mp-fg); background: var(--mp-bg);
  border: 1px solid var(--mp-line); border-radius: 4px; overflow: hidden }
body[data-jp-theme-light="false"] .medlab-panel { --mp-brand: #64b5f6; --mp-on: #10202c; --mp-ok: #7ed492; --mp-warn: #f0b040; --mp-bad: #ff8a80 }
.medlab-panel *, .medlab-panel *::after { box-sizing: border-box }
.medlab-panel button, .medlab-panel input, .medlab-panel select { font: inherit; color: inherit; margin: 0 }
.medlab-panel button { cursor: pointer }
.medlab-panel :focus { outline: none }
.medlab-panel :focus-visible { outline: 2px solid var(--mp-brand); outline-offset: 1px }
.medlab-panel [hidden] { display: none !important }
.medlab-panel [inert] { opacity: .5 }
.mp-ok { color: var(--mp-ok) } .mp-warn { color: var(--mp-warn) } .mp-bad { color: var(--mp-bad) } .mp-brand { color: var(--mp-brand) } .mp-muted { color: var(--mp-muted) }
.mp-rest { min-height: 0; overflow: hidden auto }
.mp-cut { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; min-width: 0 }
.mp-head { padding: 10px 12px 0 }
.mp-title { display: flex; align-items: center; gap: 10px; height: 22px }
.mp-name { flex: 1; font-size: 14px; font-weight: 600 }
.mp-state { display: inline-flex; align-items: center; gap: 6px; font-weight: 600; white-space: nowrap }
.mp-dot { width: 9px; height: 9px; border-radius: 50%; background: currentColor }
.mp-bar { height: 3px; margin: 6px 0 8px; border-radius: 2px; background: var(--mp-soft); overflow: hidden }
.mp-bar > div { height: 100%; width: 0; background: var(--mp-brand) }
.mp-facts { display: grid; grid-template-columns: minmax(0, 1.9fr) repeat(3, minmax(0, 1fr)); gap: 4px 10px; height: 74px; font-variant-numeric: tabular-nums }
.mp-facts span { display: block; height: 15px; color: var(--mp-muted); font-size: 11px; line-height: 15px }
.mp-facts b { display: block; height: 19px; font-weight: 500; font-size: 13px; line-height: 19px }
.mp-buttons { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 6px; padding: 4px 12px 0 }
.mp-button { height: 28px; padding: 0 4px; border: 1px solid var(--mp-edge); border-radius: 3px; background: var(--mp-bg); white-space: nowrap; overflow: hidden }
.mp-button:hover { background: var(--mp-soft) }
.mp-button.mp-main { border-color: var(--mp-brand); background: var(--mp-brand); color: var(--mp-on) !important; font-weight: 600 }
.mp-button[aria-disabled=true] { border-color: var(--mp-line); background: none; color: var(--mp-muted) !important; opacity: .65; cursor: default; font-weight: 400 }
.mp-until { display: flex; align-items: center; gap: 8px; height: 34px; padding: 0 12px; color: var(--mp-muted) }
.mp-until label { display: flex; align-items: center; gap: 6px; white-space: nowrap }
.mp-until input { width: 76px }
.mp-said { flex: 1; min-width: 0; text-align: right; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden; max-height: 2.4em; line-height: 1.2; font-size: 11px }
.mp-restore { margin: 0 12px 10px; padding: 8px; border: 1px solid var(--mp-line); border-radius: 3px }
.mp-kept { max-height: 118px; overflow: auto; display: grid; gap: 2px }
.mp-kept button { display: flex; gap: 10px; width: 100%; padding: 2px 6px; border: 0; border-radius: 3px; background: none; text-align: left; font-variant-numeric: tabular-nums }
.mp-kept button:hover, .mp-kept button[aria-checked=true] { background: var(--mp-soft) }
.mp-kept button[aria-checked=true] { box-shadow: inset 2px 0 var(--mp-brand) }
.mp-kept span { flex: 1 } .mp-kept span + span { color: var(--mp-muted); text-align: right }
.mp-sure { display: flex; align-items: center; gap: 6px; margin-top: 8px }
.mp-sure > span { flex: 1 } .mp-sure button { padding: 0 10px }
.mp-trouble { display: grid; grid-template-columns: minmax(0, 1fr); gap: 8px; padding: 0 12px }
.mp-trouble:not(:empty) { padding-bottom: 10px }
.mp-fault { position: relative; padding: 6px 10px 7px; border: 1px solid var(--mp-line); border-left: 3px solid currentColor; border-radius: 3px; overflow-wrap: anywhere }
.mp-fault > * { color: var(--mp-fg) } .mp-fault > strong { color: inherit } .mp-fault > .mp-muted { color: var(--mp-muted) }
.mp-fault summary { cursor: pointer; color: var(--mp-muted); margin-top: 3px; width: max-content }
.medlab-panel .mp-fault pre { max-height: 200px; margin: 4px 0 0; padding: 6px; overflow: auto; color: var(--mp-fg); font: 11px/1.4 var(--jp-code-font-family, monospace); white-space: pre; background: var(--mp-soft); border-radius: 3px }
.mp-close { position: absolute; top: 3px; right: 3px; width: 22px; height: 22px; padding: 0; border: 0; border-radius: 3px; background: none }
.mp-close:hover { background: var(--mp-soft) }
.mp-note { margin: 0 12px 10px; color: var(--mp-muted) }
.mp-section { border-top: 1px solid var(--mp-line) }
.mp-bartop { display: flex; align-items: center; gap: 8px; height: 34px; padding-right: 12px }
.mp-fold { display: flex; align-items: center; gap: 6px; flex: 1 1 auto; min-width: 0; height: 100%; padding: 0 0 0 10px; border: 0; background: none; text-align: left; font-weight: 600 !important; border-radius: 3px }
.mp-fold::before { content: ""; width: 0; height: 0; border: 4px solid transparent; border-left: 5px solid currentColor; border-right: 0; opacity: .6 }
.mp-fold[aria-expanded=true]::before { transform: rotate(90deg) }
.mp-fold .mp-muted { font-weight: 400 }
.mp-bartop input, .mp-bartop select { flex: 0 1 130px; min-width: 60px }
.mp-group > .mp-fold { width: 100%; height: 26px; padding-left: 12px; font-weight: 500 !important; color: var(--mp-muted) !important }
.mp-caption { padding: 3px 12px 0; color: var(--mp-muted); font-size: 11px }
.mp-body { padding-bottom: 8px }
.mp-row { padding: 1px 12px 1px 14px }
.mp-row[data-differs=true] { box-shadow: inset 2px 0 var(--mp-brand) }
.mp-line { display: flex; align-items: center; gap: 6px; height: 27px }
.mp-label { display: inline-flex; align-items: center; gap: 5px; flex: 0 1 auto; min-width: 40px; height: 22px; padding: 0; border: 0; background: none; text-align: left; border-radius: 3px }
.mp-label > i { flex: none; display: grid; place-items: center; width: 15px; height: 15px; border: 1px solid currentColor; border-radius: 50%; font: 600 11px/1 var(--jp-ui-font-family, sans-serif); opacity: .5 }
.mp-label:hover > i, .mp-label:focus-visible > i, .mp-label[aria-expanded=true] > i { opacity: 1 }
.mp-unit { color: var(--mp-muted); font-size: 11px; flex: 0 1000 auto }
.mp-reset { flex: none; width: 20px; height: 20px; padding: 0; border: 0; border-radius: 3px; background: none; color: var(--mp-brand) !important; line-height: 1 }
.mp-reset:hover { background: var(--mp-soft) }
.mp-fate { flex: 1 1 70px; text-align: right; font-size: 11px; font-variant-numeric: tabular-nums }
.mp-fate:empty { flex-basis: 0 }
.mp-fine { display: flex; align-items: center; gap: 10px; height: 26px; padding-bottom: 2px }
.mp-fine label { display: flex; align-items: center; gap: 4px; color: var(--mp-muted) }
.medlab-panel input[type=text], .medlab-panel input[type=search], .medlab-panel select { height: 24px; padding: 0 6px; border: 1px solid var(--mp-edge); border-radius: 3px; background: var(--mp-bg); font-variant-numeric: tabular-nums }
.medlab-panel input[type=text] { text-align: right }
.medlab-panel input:disabled, .medlab-panel select:disabled { opacity: .6; border-color: var(--mp-line) }
.medlab-panel input[aria-invalid=true] { border-color: var(--mp-bad) }
.medlab-panel input[type=range] { flex: 1 1 50px; min-width: 50px; height: 20px; accent-color: var(--mp-brand) }
.medlab-panel input[type=checkbox] { accent-color: var(--mp-brand) }
.mp-number { width: 82px; flex: none }
.mp-row select { flex: none; max-width: 118px }
.mp-row[data-pending=true] input[type=text], .mp-row[data-pending=true] select { border-style: dashed; border-color: var(--mp-brand) }
.medlab-panel .mp-switch { position: relative; flex: none; width: 34px; height: 18px; padding: 0; border: 1px solid var(--mp-edge); border-radius: 9px; background: var(--mp-soft) }
.mp-switch::after { content: ""; position: absolute; top: 2px; left: 2px; width: 12px; height: 12px; border-radius: 50%; background: var(--mp-muted) }
.medlab-panel .mp-switch[aria-checked=true] { background: var(--mp-brand); border-color: var(--mp-brand) }
.mp-switch[aria-checked=true]::after { left: 18px; background: var(--mp-on) }
.mp-switch[data-partly=true]::after { left: 10px; background: var(--mp-brand) }
.medlab-panel .mp-row[data-pending=true] .mp-switch { border-style: dashed; border-color: var(--mp-brand) }
.mp-row[data-pending=true] .medlab-panel .mp-switch[aria-checked=true] { background: none } .mp-row[data-pending=true] .mp-switch[aria-checked=true]::after { background: var(--mp-brand) }
.mp-switch[aria-disabled=true] { opacity: .55; cursor: default }
.mp-why { padding: 0 0 5px; font-size: 11px; overflow-wrap: anywhere } .mp-why button { height: 20px; margin-left: 6px; padding: 0 8px }
.mp-help { margin: 0 0 6px; padding: 4px 8px; border-left: 2px solid var(--mp-line); color: var(--mp-muted); font-size: 11.5px; overflow-wrap: anywhere }
.mp-help p { margin: 0 } .mp-help p:first-child { color: var(--mp-fg) }
.mp-log { height: 236px; overflow: auto; border-top: 1px solid var(--mp-line); overflow-wrap: anywhere }
.mp-item { display: grid; grid-template-columns: 58px minmax(0, 1fr); gap: 0 8px; padding: 4px 12px 4px 9px; border-left: 3px solid transparent }
.mp-item + .mp-item { border-top: 1px solid var(--mp-line) }
.mp-item[data-level=warning] { border-left-color: var(--mp-warn) } .mp-item[data-level=error] { border-left-color: var(--mp-bad) }
.mp-item time { color: var(--mp-muted); font-size: 11px; line-height: 17px; font-variant-numeric: tabular-nums }
.mp-item b { font-weight: 600 } .mp-item[data-level=warning] b { color: var(--mp-warn) } .mp-item[data-level=error] b { color: var(--mp-bad) }
.mp-older { display: block; width: 100%; height: 28px; border: 0; border-top: 1px solid var(--mp-line); background: none; color: var(--mp-brand) !important }
.mp-empty { padding: 6px 12px; color: var(--mp-muted) }
@container (max-width: 359px) {
  .mp-facts { grid-template-columns: minmax(0, 1.3fr) repeat(2, minmax(0, 1fr)); height: 111px }
  .mp-facts > :nth-child(5) { grid-column: 2 / span 2 }
  .mp-buttons { grid-template-columns: repeat(3, minmax(0, 1fr)) }
  .mp-until { height: 42px; padding-top: 6px }
  .mp-unit { display: none }
  .mp-bartop select { flex-basis: 92px }
  .mp-bartop .mp-fold .mp-muted { display: none }
  .mp-label { height: auto }
  .mp-label .mp-cut { white-space: normal; overflow-wrap: anywhere; line-height: 1.1 }
}
@media (prefers-reduced-motion: no-preference) { .mp-switch::after { transition: left .12s } }`;

// ---- words and numbers ----

function make(tag, name, text, attributes) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  for (const [k, v] of Object.entries(attributes ?? {})) e.setAttribute(k, v);
  return e;
}

function say(e, text, title) {  // touches the page only where something is another
  if (e.textContent !== text) e.textContent = text;
  if (title !== undefined && e.title !== title) e.title = title;
}

function told(v) {  // a knob's value, in words; a number as the shortest text that reads back as the same
  if (v === null || v === undefined || v === false) return v === undefined ? "–" : "off";
  if (v === true) return "on";
  if (typeof v !== "number") return String(v);
  const a = Math.abs(v);
  return a && (a < 0.01 || a >= 1e6) && !(Number.isInteger(v) && a < 1e9) ? v.toExponential().replace("e+", "e") : String(v);
}

function rough(v, digits = 4) {  // a measurement
  if (v === null || v === undefined) return "–";
  if (typeof v === "string") return v === "nan" ? "NaN" : v.replace("-", "−");
  const a = Math.abs(v), text = a && (a < 1e-3 || a >= 1e6) ? v.toExponential(digits - 2).replace("e+", "e").replace("e-", "e−") : Number(v.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
  return text.replace(/^-/, "−");
}

const whole = v => v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en-US");
const short = v => v >= 1e6 ? Number((v / 1e6).toPrecision(4)) + "M" : v >= 1e4 ? Number((v / 1e3).toPrecision(4)) + "k" : String(v);
const size = b => b >= 1e9 ? (b / 1e9).toFixed(1) + " GB" : b >= 1e6 ? (b / 1e6).toFixed(1) + " MB" : Math.max(1, Math.round(b / 1e3)) + " kB";
const same = (a, b) => a === b || typeof a === "number" && typeof b === "number" && Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(a), Math.abs(b));
const clock = t => new Date(1000 * t).toLocaleTimeString("en-GB");

function age(t) {
  const s = Math.max(0, Date.now() / 1000 - t), [n, unit] = s < 60 ? [s, "s"] : s < 3600 ? [s / 60, "min"] : s < 86400 ? [s / 3600, "h"] : [s / 86400, "d"];
  return s < 2 ? "just now" : `${Math.floor(n)} ${unit} ago`;
}

function read(text, info) {  // {value} or {error}: what a user typed, against the knob's rule
  let t = text.trim().replace(/−/g, "-");
  if (/^(off|none)$/i.test(t) && info.optional) return { value: null };
  if (/^[+-]?\d{1,3}(,\d{3})+$/.test(t)) t = t.replace(/,/g, "");
  const value = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(t) ? Number(t) : NaN;
  const within = Number.isFinite(value) && (info.low === null || value >= info.low) && (info.high === null || value <= info.high) && !(info.above && value === info.low);
  return within && (info.kind !== "int" || Number.isInteger(value)) ? { value } : { error: `${text.trim() || "nothing"} was not asked for: it must be ${info.rule}` };
}

// ---- sliders: positions 0 … n, twenty a decade ----

const tidy = v => Number(v.toPrecision(2)), power = v => Math.floor(Math.log10(v) + 1e-9);

function scaleFor(info, typical) {  // {n, to(value) → position, from(position) → value}, or null where a slider does not fit
  const { low, high } = info;
  if (low === null || low < 0) return null;
  if (high === 1 && typical >= 0.9) return tail(info);
  const middle = typical > 0 ? typical : Math.min(high ?? 1, 1) / 1000, zero = low === 0 && !info.above ? 1 : 0;
  let lo = 10 ** (power(middle) - 3), hi = 10 ** (power(middle) + 3);
  if (high !== null && hi > high) hi = high;
  if (low > 0 && lo < low) lo = low;
  if (!(hi > lo)) return null;
  const n = Math.round(Math.log10(hi / lo) * PER_DECADE), first = zero ? PER_DECADE / 2 : 0;  // zero lies half a decade below
  return {
    n: n + first, holds: v => v === 0 ? zero === 1 : v >= lo / 1.001 && v <= hi * 1.001,
    to: v => v === 0 ? 0 : first + Math.round(Math.log10(v / lo) * PER_DECADE),
    from: p => zero && p < first / 2 ? 0 : p - first >= n ? hi : tidy(lo * 10 ** (Math.max(0, p - first) / PER_DECADE)),
  };
}

function tail(info) {  // near 1 the distance from 1 is what counts: 0.9, 0.99, 0.999
  const n = 5 * PER_DECADE, v = p => Number((1 - tidy(10 ** (-p / PER_DECADE))).toPrecision(8));
  return { n, holds: x => x >= 0 && x < 1 && 1 - x >= 0.99e-5, to: x => Math.max(0, Math.min(n, Math.round(-Math.log10(1 - x) * PER_DECADE))), from: p => info.above && p === 0 ? v(1) : v(p) };
}

// ---- the panel ----

// What was said so far, one message of a kind; a view that comes later is told it.
function memory() {
  const last = new Map();
  const lines = (old, m) => { const all = new Map([...old.lines, ...m.lines].map(l => [l.key, l])); return [...all.values()].sort((a, b) => b.place - a.place).slice(0, MOST) };
  const join = { values: (old, m) => ({ ...m, all: true, values: { ...old.values, ...m.values } }), changes: (old, m) => ({ ...m, all: true, changes: { ...old.changes, ...m.changes } }), log: (old, m) => ({ ...m, all: true, lines: lines(old, m) }) };
  return {
    keep(m) { if (m?.t && m.t !== "answer") last.set(m.t, join[m.t] && !m.all && last.has(m.t) ? join[m.t](last.get(m.t), m) : m) },
    tell(heard) { for (const m of last.values()) heard(m) },
  };
}

function view({ model, el, past }) {
  const S = { spec: null, head: {}, can: {}, doing: "", values: {}, changes: {}, mine: {}, rows: new Map(), fixes: [], groups: [], lines: new Map(), items: new Map(), proofs: {}, kept: [], more: false, dead: false, folded: {}, aside: "" };
  const root = make("div", "medlab-panel", undefined, { role: "group", "aria-label": "Panel of a run", "data-lm-suppress-shortcuts": "true" }), style = make("style", "", CSS + PROOF_CSS);
  root.addEventListener("keydown", e => e.stopPropagation());
  const words = () => Math.random().toString(36).slice(2, 12), timers = new Set();
  const later = (call, ms) => { const t = setTimeout(() => { timers.delete(t); call() }, ms); timers.add(t); return t };
  const ask = (t, more = {}) => { const request = words(); model.send({ t, request, ...more }); return request };

  // -- head --

  const head = make("div", "mp-head"), title = make("div", "mp-title"), name = make("span", "mp-name mp-cut"), state = make("span", "mp-state"), dot = make("span", "mp-dot"), word = make("span");
  const bar = make("div", "mp-bar", undefined, { role: "progressbar", "aria-label": "Steps made", "aria-valuemin": 0 }), done = make("div"), facts = make("div", "mp-facts"), fact = {};
  state.append(dot, word); title.append(name, state); bar.append(done);
  for (const [key, label] of [["step", "step"], ["loss", "loss"], ["rate", "steps/s"], ["mem", "memory"], ["device", "device · precision"], ["scale", "loss scale"], ["skipped", "skipped"], ["row", "in a row"]]) {
    const box = make("div", "mp-cut"), caption = make("span", "mp-cut", label), value = make("b", "mp-cut", "–");
    box.append(caption, value); facts.append(box); fact[key] = { box, caption, value };
  }
  head.append(title, bar, facts);

  function drawHead() {
    const h = S.head, target = h.target !== null && h.target < ENDLESS ? h.target : null, fp16 = h.precision === "fp16", shown = alive.word(h.state);
    say(name, S.spec?.name ?? "", S.spec?.name ?? "");
    say(word, shown, alive.why(h.state));
    state.className = "mp-state mp-" + (alive.dead || alive.silent ? "muted" : TONE[h.state] ?? "muted"); root.dataset.state = h.state ?? "";
    done.style.width = target && h.step !== null ? `${Math.min(100, 100 * h.step / target)}%` : "0";
    if (target) { bar.setAttribute("aria-valuemax", target); bar.setAttribute("aria-valuenow", h.step ?? 0) } else { bar.removeAttribute("aria-valuemax"); bar.removeAttribute("aria-valuenow") }
    say(fact.step.value, whole(h.step) + (target ? ` / ${short(target)}` : ""), target ? `step ${whole(h.step)} of ${whole(target)}` : `step ${whole(h.step)}, no last step`);
    say(fact.loss.value, rough(h.loss), `loss of the last step: ${h.loss ?? "none yet"}`); fact.loss.value.classList.toggle("mp-bad", typeof h.loss === "string");
    say(fact.rate.value, h.state === "running" ? rough(h.rate, 3) : "–", "steps per second, validations and checkpoints not counted");
    say(fact.mem.caption, h.gpu === null || h.gpu === undefined ? "memory" : "GPU memory");
    say(fact.mem.value, (h.gpu ?? h.mem) === null || (h.gpu ?? h.mem) === undefined ? "–" : `${(h.gpu ?? h.mem).toFixed((h.gpu ?? h.mem) < 10 ? 2 : 1)} GB`, `host ${rough(h.mem, 3)} GB${h.gpu === null || h.gpu === undefined ? "" : `, GPU ${rough(h.gpu, 3)} GB`}`);
    say(fact.device.value, [h.device, h.precision].filter(Boolean).join(" · ") || "–", `computed on ${h.device ?? "?"}, forward pass in ${h.precision ?? "?"}`);
    for (const k of ["scale", "skipped", "row"]) fact[k].box.style.visibility = fp16 || k === "skipped" && h.skipped > 0 || k === "row" && h.row > 0 ? "" : "hidden";
    say(fact.scale.value, rough(h.scale, 5), "loss scale of the last fp16 step"); say(fact.skipped.value, whole(h.skipped), "steps that were skipped since the start of the run"); say(fact.row.value, whole(h.row), "steps skipped in a row until now");
    fact.row.value.classList.toggle("mp-bad", h.row > 2);
  }

  // -- buttons --

  const buttons = make("div", "mp-buttons", undefined, { role: "group", "aria-label": "Training" }), button = {}, until = make("div", "mp-until"), last = make("input", "", undefined, { type: "text", inputmode: "numeric", "aria-label": "Last step, or nothing for no limit", placeholder: "no limit", title: "number of the last step; nothing: until Stop" });
  const said = make("span", "mp-said", "", { role: "status" }), untilLabel = make("label", "", "until step");
  for (const [key, label] of BUTTONS) { button[key] = make("button", "mp-button", label, { type: "button" }); buttons.append(button[key]); button[key].onclick = () => press(key) }
  button.restore.setAttribute("aria-expanded", false);
  untilLabel.append(last); until.append(untilLabel, said);
  last.onkeydown = e => { if (e.key === "Enter") press("start") };
  last.oninput = () => { last.dataset.typed = "true"; last.removeAttribute("aria-invalid") };

  function press(key) {
    if (key === "pause" && S.head.state === "paused") key = "resume";
    const why = S.can[key];
    if (why !== "") return remark(why ?? "the kernel has not told yet what is possible", "warn");
    if (key === "restore") return choose(restore.hidden);
    const more = {};
    if (key === "start" && last.value.trim()) {
      const t = read(last.value, { kind: "int", low: (S.head.step ?? 0) + 1, high: null, rule: `an integer > ${S.head.step ?? 0}, the last step made` });
      if (t.error) { last.setAttribute("aria-invalid", true); return remark(t.error, "bad") }
      more.until = t.value;
    }
    delete last.dataset.typed; remark("");
    waitFor(ask("do", { name: key, ...more }));
  }

  function waitFor(request) { S.waiting = request; later(() => { if (S.waiting === request) remark("the kernel has not answered yet; a cell may be running", "warn") }, 2500) }

  function remark(text, tone = "muted") { S.aside = text; said.className = `mp-said mp-${tone}`; say(said, text || S.doing, text || S.doing) }

  function drawButtons() {
    const paused = S.head.state === "paused", main = paused ? "pause" : S.can.start === "" ? "start" : "";
    say(button.pause, paused ? "Resume" : "Pause");
    for (const [key, label] of BUTTONS) {
      const which = key === "pause" && paused ? "resume" : key, why = S.can[which] ?? "not known yet", b = button[key];
      b.setAttribute("aria-disabled", why !== ""); b.classList.toggle("mp-main", key === main && why === "");
      b.title = why ? `${which === "resume" ? "Resume" : label} is not possible: ${why}` : { start: "Train, until Stop or until the step below", pause: "Pause before the next step", resume: "Go on", stop: "Stop before the next step, and save", save: "Write a checkpoint now", restore: "Go back to a kept checkpoint" }[which];
    }
    const free = S.can.start === "";
    last.disabled = !free;
    if (!last.dataset.typed && document.activeElement !== last) { const t = S.head.target, v = t && t < ENDLESS && (!free || t > (S.head.step ?? 0)) ? String(t) : ""; if (last.value !== v) last.value = v }
    if (!S.aside) remark("");
    if (S.can.restore && !restore.hidden) choose(false);
  }

  // -- restore --

  const restore = make("div", "mp-restore", undefined, { role: "group", "aria-label": "Kept checkpoints" }), kept = make("div", "mp-kept", undefined, { role: "radiogroup", "aria-label": "Checkpoint to go back to" }), sure = make("div", "mp-sure"), sureText = make("span"), go = make("button", "mp-button mp-main", "Go back", { type: "button" }), never = make("button", "mp-button", "Cancel", { type: "button" });
  let chosen = null;
  sure.append(sureText, go, never); restore.append(kept, sure); restore.hidden = true;
  never.onclick = () => { choose(false); button.restore.focus() };
  restore.onkeydown = e => { if (e.key === "Escape") never.onclick() };
  go.onclick = () => { const step = chosen; choose(false); button.restore.focus(); remark(""); waitFor(ask("do", { name: "restore", step })) };

  function choose(open) {
    restore.hidden = !open; button.restore.setAttribute("aria-expanded", open);
    if (open) { chosen = S.kept[0]?.[0] ?? null; drawKept(); kept.querySelector("[aria-checked=true]")?.focus() }
  }

  function drawKept() {
    if (restore.hidden) return;
    if (!S.kept.some(k => k[0] === chosen)) chosen = S.kept[0]?.[0] ?? null;
    const within = kept.contains(document.activeElement);
    kept.replaceChildren(...S.kept.map(([step, time, bytes]) => {
      const on = step === chosen, b = make("button", "", undefined, { type: "button", role: "radio", "aria-checked": on, tabindex: on ? 0 : -1 });
      b.append(make("span", "", `step ${whole(step)}`), make("span", "", age(time)), make("span", "", size(bytes)));
      b.onclick = () => { chosen = step; drawKept(); kept.querySelector("[aria-checked=true]").focus() };
      return b;
    }));
    if (within) kept.querySelector("[aria-checked=true]")?.focus();
    sureText.textContent = chosen === null ? "no checkpoint is kept" : `Steps after ${whole(chosen)} leave the history.`;
    go.hidden = chosen === null;
  }
  kept.onkeydown = e => {
    const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[e.key], at = S.kept.findIndex(k => k[0] === chosen);
    if (move && at >= 0) { e.preventDefault(); chosen = S.kept[Math.max(0, Math.min(S.kept.length - 1, at + move))][0]; drawKept(); kept.querySelector("[aria-checked=true]").focus() }
  };

  // -- errors and faults --

  const trouble = make("div", "mp-trouble", undefined, { role: "region", "aria-label": "Errors", "aria-live": "polite" }), note = make("div", "mp-note");
  note.hidden = true;

  function drawTrouble(items) {
    const open = new Set([...trouble.querySelectorAll("details[open]")].map(d => d.parentNode.dataset.key)), held = new Map([...trouble.children].map(c => [c.dataset.said, c]));
    trouble.replaceChildren(...items.map(item => held.get(JSON.stringify(item)) ?? fault(item, open.has(item.key))));
  }

  function fault(item, open) {
    const box = make("div", `mp-fault mp-${item.level === "error" ? "bad" : "warn"}`);
    box.dataset.key = item.key; box.dataset.said = JSON.stringify(item);
    box.append(make("strong", "", item.title), make("div", "", item.text));
    if (item.facts) box.append(make("div", "mp-muted", item.facts));
    if (item.trace) { const d = make("details"); d.open = open; const p = make("pre", "", item.trace, { tabindex: 0 }); d.ontoggle = () => { p.scrollTop = p.scrollHeight }; d.append(make("summary", "", "traceback"), p); box.append(d) }
    if (item.dismiss) { const b = make("button", "mp-close", "×", { type: "button", "aria-label": `Dismiss: ${item.title}`, title: "Dismiss" }); b.onclick = () => ask("dismiss", { key: item.key }); box.append(b) }
    return box;
  }

  // -- asking, and what became of it --

  function wish(knobs, t, more) {  // shown at once; the kernel's word follows
    const request = ask(t, more);
    for (const [k, value] of Object.entries(knobs)) S.mine[k] = { value, request, key: S.changes[k]?.key, slow: false };
    later(() => { for (const m of Object.values(S.mine)) if (m.request === request) m.slow = true; drawRows() }, 2500);
    drawRows();
  }
  const set = (k, value) => wish({ [k]: value }, "set", { knobs: { [k]: value } });

  function settle() {  // what the kernel knows of is no longer ours to show
    for (const [k, m] of Object.entries(S.mine)) if (S.changes[k]?.key !== m.key) delete S.mine[k];
  }

  const inForce = k => S.values[k];
  const asked = k => k in S.mine ? S.mine[k].value : S.changes[k]?.state === "pending" ? S.changes[k].asked : S.values[k];
  const pending = k => k in S.mine || S.changes[k]?.state === "pending";

  function fateOf(k, unit = "") {  // {text, tone, title, why} of a knob's last change
    const f = S.changes[k], now = `${told(inForce(k))}`, live = S.head.state === "running" || S.head.state === "starting";
    if (k in S.mine) return { text: S.mine[k].slow ? "waiting for the kernel" : "asking", tone: S.mine[k].slow ? "warn" : "muted", title: `${k}: asked for ${told(S.mine[k].value)}, in force is ${now}` };
    if (!f) return { text: "", tone: "muted", title: "" };
    const said = `${k} → ${told(f.asked)}, asked for by ${f.source} at ${clock(f.time)}`;
    if (f.state === "pending") return { text: `${f.at !== null ? `at step ${whole(f.at)}` : live ? "pending" : S.head.state === "paused" ? "after the pause" : "waits for Start"} · now ${now}`, tone: "brand", title: `${said}; ${live ? "applied before the next step" : "applied when training goes on"}; in force is ${now}` };
    if (f.state === "applied") return { text: `${f.ok ? "✓ " : ""}step ${whole(f.step)}`, tone: f.ok ? "ok" : "warn", title: `${said}; ${told(f.old)} → ${told(f.new)} applied at step ${whole(f.step)}, ${f.ok ? "verified: read back from the objects that use it" : "not verified"}` };
    if (f.state === "refused" && ASKED_AGAIN.test(f.reason ?? "")) return { text: "asked for again", tone: "muted", title: `${said}; ${f.reason}` };
    if (f.state === "undone") return { text: "undone", tone: "muted", title: `${said}; ${f.reason ?? "the run went back before it"}` };
    return { text: f.state, tone: f.state === "refused" ? "bad" : "warn", title: said, why: f.reason || `${f.state} without a reason` };
  }

  // -- rows: what knobs and fixes have in common --

  function row(label, unit, tip) {
    const box = make("div", "mp-row"), line = make("div", "mp-line"), name = make("button", "mp-label", undefined, { type: "button", "aria-expanded": false, title: tip }), fate = make("span", "mp-fate mp-cut"), why = make("div", "mp-why mp-bad"), help = make("div", "mp-help"), id = "mp-" + words();
    name.append(make("span", "mp-cut", label)); if (unit) name.append(make("span", "mp-unit mp-cut", unit)); name.append(make("i", "", "?"));
    name.lastChild.setAttribute("aria-hidden", true); name.setAttribute("aria-controls", id); help.id = id; help.hidden = why.hidden = true;
    line.append(name, fate); box.append(line, why, help);
    const r = { box, line, name, fate, why, help, tellHelp: () => [] };
    name.onclick = () => { help.hidden = !help.hidden; name.setAttribute("aria-expanded", !help.hidden); fill(r) };
    return r;
  }

  function fill(r) { if (!r.help.hidden) { const t = r.tellHelp().filter(Boolean); if (r.said !== t.join("\n")) { r.said = t.join("\n"); r.help.replaceChildren(...t.map(s => make("p", "", s))) } } }

  function showFate(r, f, draft) {
    r.fate.className = `mp-fate mp-cut mp-${f.tone}`; say(r.fate, f.text, f.title);
    if (draft) return;
    const why = f.why ?? "";
    if (r.why.dataset.said !== why) { r.why.dataset.said = why; r.why.className = `mp-why mp-${f.tone}`; r.why.replaceChildren(document.createTextNode(why)); }
    r.why.hidden = !why;
  }

  function toggle(label, onclick) {
    const b = make("button", "mp-switch", undefined, { type: "button", role: "switch", "aria-checked": false, "aria-label": label });
    b.onclick = () => { if (b.getAttribute("aria-disabled") !== "true") onclick() };
    return b;
  }

  const readOnly = () => !S.spec?.controls;

  // -- fixes --

  const proof = proving(ask, later);

  function fixRow(fix) {
    const knobs = Object.keys(fix.on), sets = knobs.map(k => `${k} ${told(fix.off[k])} → ${told(fix.on[k])}`).join(", ");
    const r = row(fix.name, "", [fix.claim && `${fix.claim}.`, fix.measured ? `Measured: ${fix.measured}.` : "", `Sets ${sets}.`].filter(Boolean).join(" "));
    r.fix = fix; r.box.dataset.fix = fix.name;
    r.control = toggle(`Fix ${fix.name}`, () => { const to = r.share < knobs.length; wish(to ? fix.on : fix.off, "fix", { name: fix.name, on: to }) });
    r.line.append(r.control); proof.attach(r, fix.name);
    r.tellHelp = () => [fix.claim ? `Claim: ${fix.claim}.` : "No claim is made for it.", `Measured: ${fix.measured || "not yet"}.`, `On and off: ${knobs.map(k => `${k} = ${told(fix.on[k])} against ${told(fix.off[k])}, in force ${told(inForce(k))}`).join("; ")}.`, fateTitle(newest(ours(fix)))];
    return r;
  }

  const fateTitle = k => k && fateOf(k).title ? `Last change: ${fateOf(k).title}.` : "";
  const ours = fix => Object.keys(fix.on).filter(k => k in S.mine || S.changes[k] && [fix.on[k], fix.off[k]].some(v => same(v, S.changes[k].asked)));  // knobs that were last set to what the fix sets
  const newest = knobs => knobs.filter(k => S.changes[k] || k in S.mine).sort((a, b) => (k => k in S.mine ? Infinity : S.changes[k].id)(b) - (k => k in S.mine ? Infinity : S.changes[k].id)(a))[0];

  function drawFix(r) {
    const knobs = Object.keys(r.fix.on), own = ours(r.fix), k = newest(own), waits = own.some(pending);
    r.share = knobs.filter(k => same(asked(k), r.fix.on[k])).length;
    const all = r.share === knobs.length, partly = r.share > 0 && !all;
    r.control.setAttribute("aria-checked", all); r.control.dataset.partly = partly; r.control.setAttribute("aria-disabled", knobs.some(k => !(k in S.values)));
    r.control.title = partly ? `partly on: ${r.share} of ${knobs.length} knobs have the on value` : all ? "on" : "off";
    r.box.dataset.pending = waits; r.box.dataset.state = all ? "on" : partly ? "partly" : "off";
    const f = k ? fateOf(k) : { text: "", tone: "muted", title: "" };
    showFate(r, partly && !f.why && !waits ? { ...f, text: `partly, ${r.share} of ${knobs.length}`, tone: "warn" } : f);
    proof.draw(r, r.fix.name, S.proofs[r.fix.name]);
    fill(r);
  }

  // -- knobs --

  function knobRow(k, info) {
    const r = row(k, info.unit ?? "", `${info.help || "no help"}. It must be ${info.rule}${info.unit ? `, ${info.unit}` : ""}. Default ${told(info.default)}.`);
    r.knob = k; r.info = info; r.box.dataset.knob = k;
    r.reset = make("button", "mp-reset", "↺", { type: "button", title: `reset to ${told(info.default)}, the default`, "aria-label": `Reset ${k} to ${told(info.default)}` });
    r.reset.onclick = () => { leave(r); set(k, info.default) };
    r.name.after(r.reset);
    r.tellHelp = () => [`${info.help || "No help"}.`, `It must be ${info.rule}${info.unit ? `, ${info.unit}` : ""}. Default ${told(info.default)}; in force ${told(inForce(k))}.`, fateTitle(k)];
    ({ bool: boolControl, enum: enumControl, int: intControl, real: realControl }[info.kind] ?? textControl)(r);
    return r;
  }

  function boolControl(r) { r.line.append(r.control = toggle(r.knob, () => set(r.knob, !asked(r.knob)))); r.put = v => { r.control.setAttribute("aria-checked", v === true); r.control.setAttribute("aria-disabled", v === undefined) } }

  function enumControl(r) {
    const list = r.info.optional ? [...r.info.choices, null] : r.info.choices, s = r.control = make("select", "", undefined, { "aria-label": r.knob });
    s.append(...list.map((c, i) => make("option", "", told(c), { value: i })));
    s.onchange = () => set(r.knob, list[s.selectedIndex]);
    r.line.append(s); r.put = v => { s.selectedIndex = list.indexOf(v); s.disabled = v === undefined };
  }

  function textControl(r) { r.line.append(r.control = make("b", "")); r.put = v => say(r.control, told(v)) }

  function field(r) {  // a number that is asked for on Enter, or when the field is left
    const i = make("input", "mp-number", undefined, { type: "text", inputmode: r.info.kind === "int" ? "numeric" : "decimal", autocomplete: "off", spellcheck: "false", "aria-label": `${r.knob}${r.info.unit ? `, ${r.info.unit}` : ""}`, title: r.info.rule });
    i.oninput = () => { r.draft = "typed"; i.removeAttribute("aria-invalid"); r.why.hidden = true; slide(r) };
    i.onkeydown = e => {
      if (e.key === "Enter") { if (r.draft) commit(r) }
      else if (e.key === "Escape" && r.draft) { leave(r); draw(r); i.select() }
      else if ((e.key === "ArrowUp" || e.key === "ArrowDown") && r.info.kind === "int") { const t = read(i.value, r.info), v = t.value + (e.key === "ArrowUp" ? 1 : -1); if (!t.error && !read(String(v), r.info).error) { i.value = String(v); i.oninput() } e.preventDefault() }
    };
    i.onblur = () => { if (r.draft === "typed") commit(r) };
    return r.field = i;
  }

  function commit(r) {
    const t = read(r.field.value, r.info);
    if (t.error) { r.field.setAttribute("aria-invalid", true); return warn(r, t.error + ". Escape takes it back.", "bad") }
    const was = r.draft;
    leave(r);
    if (!same(t.value, asked(r.knob)) || was === "offered") set(r.knob, t.value); else draw(r);
  }

  function leave(r) { clearTimeout(r.timer); r.draft = null; if (r.field) r.field.removeAttribute("aria-invalid"); r.why.dataset.said = "\0" }

  function warn(r, text, tone, action) {
    r.why.dataset.said = "\0"; r.why.className = `mp-why mp-${tone}`; r.why.replaceChildren(document.createTextNode(text)); if (action) r.why.append(action);
    r.why.hidden = false;
  }

  function offBox(r) {  // "off" is a value of its own; what comes instead is proposed, and asked for when the user says so
    const label = make("label"), box = r.off = make("input", "", undefined, { type: "checkbox", "aria-label": `${r.knob} off` });
    label.append(box, document.createTextNode("off")); label.title = `${r.knob}: off`;
    box.onchange = () => {
      if (box.checked) { const offered = r.draft === "offered"; leave(r); return asked(r.knob) === null && offered ? draw(r) : set(r.knob, null) }
      r.draft = "offered"; r.field.disabled = false; r.field.value = told(proposal(r)); slide(r);
      const b = make("button", "mp-button", `Set ${r.field.value}`, { type: "button" });
      b.onclick = () => { commit(r); r.field.focus() };
      warn(r, "Enter sets it, Escape leaves it off.", "muted", b); r.field.focus(); r.field.select();
    };
    return label;
  }

  function proposal(r) {
    const hint = S.spec.controls.fixes.map(f => f.on[r.knob]).find(v => typeof v === "number");
    return [S.changes[r.knob]?.old, r.info.default, hint].find(v => typeof v === "number") ?? (r.info.kind === "int" ? Math.max(1, r.info.low ?? 1) : r.info.high === null ? 1 : Math.min(1, r.info.high / 2));
  }

  function intControl(r) {
    r.line.append(r.control = field(r));
    if (r.info.optional) r.line.append(offBox(r));
    r.put = v => { r.field.value = v === null ? "" : told(v); r.field.placeholder = v === null ? "off" : ""; r.field.disabled = v === null || v === undefined; if (r.off) r.off.checked = v === null };
  }

  function realControl(r) {
    const fine = make("div", "mp-fine"), s = r.slider = make("input", "", undefined, { type: "range", min: 0, max: 100, step: 1, "aria-label": `${r.knob}, logarithmic slider` });
    s.onpointerdown = () => { r.keyed = false }; s.onkeydown = () => { r.keyed = true };
    s.oninput = () => { const v = r.scale.from(Number(s.value)); r.draft = "slid"; r.field.value = told(v); s.setAttribute("aria-valuetext", `${told(v)} ${r.info.unit ?? ""}`); r.field.removeAttribute("aria-invalid") };
    s.onchange = () => { clearTimeout(r.timer); if (r.keyed) r.timer = setTimeout(() => commit(r), 400); else commit(r) };
    s.onblur = () => { if (r.draft === "slid") commit(r) };
    fine.append(s, r.control = field(r)); if (r.info.optional) fine.append(offBox(r));
    r.line.after(fine);
    r.put = v => { r.field.value = v === null ? "" : told(v); r.field.placeholder = v === null ? "off" : ""; r.field.disabled = v === null || v === undefined; if (r.off) r.off.checked = v === null; slide(r, v) };
  }

  function slide(r, v = read(r.field.value, r.info).value) {  // the slider follows; its range moves only where the value leaves it
    if (!r.slider) return;
    const typical = typeof v === "number" && v > 0 ? v : [r.info.default, proposal(r)].find(x => typeof x === "number" && x > 0);
    if (!r.scale || typeof v === "number" && !r.scale.holds(v)) r.scale = scaleFor(r.info, typical);
    r.slider.style.visibility = r.scale ? "" : "hidden"; r.slider.disabled = typeof v !== "number";
    if (!r.scale) return;
    r.slider.max = r.scale.n; r.slider.value = typeof v === "number" ? r.scale.to(v) : r.scale.n / 2;
    r.slider.setAttribute("aria-valuetext", `${told(v)} ${r.info.unit ?? ""}`);
    r.slider.title = `${told(r.scale.from(0))} … ${told(r.scale.from(r.scale.n))}, logarithmic`;
  }

  function draw(r) {
    const v = asked(r.knob), differs = v !== undefined && !same(v, r.info.default);
    r.box.dataset.pending = pending(r.knob); r.box.dataset.differs = differs;
    r.box.dataset.fate = r.knob in S.mine ? "asking" : S.changes[r.knob]?.state ?? "";
    r.reset.style.visibility = differs ? "" : "hidden"; r.reset.disabled = !differs;
    showFate(r, fateOf(r.knob), r.draft);
    if (!r.draft) r.put(v);
    fill(r);
  }

  // -- sections --

  function section(title, open, tools = []) {
    const box = make("section", "mp-section", undefined, { "aria-label": title }), top = make("div", "mp-bartop"), fold = make("button", "mp-fold", undefined, { type: "button", "aria-expanded": open }), count = make("span", "mp-muted mp-cut"), body = make("div", "mp-body");
    fold.append(make("span", "", title), count); top.append(fold, ...tools); box.append(top, body); body.hidden = !open;
    fold.onclick = () => { body.hidden = !body.hidden; fold.setAttribute("aria-expanded", !body.hidden) };
    return { box, top, fold, count, body };
  }

  const filter = make("input", "", undefined, { type: "search", placeholder: "filter", "aria-label": "Show knobs whose name, group or help holds this" });
  const fixes = section("Fixes", true), knobs = section("Knobs", true, [filter]);
  filter.oninput = () => { if (knobs.body.hidden) knobs.fold.onclick(); drawGroups() };
  filter.onkeydown = e => { if (e.key === "Escape" && filter.value) { filter.value = ""; drawGroups() } };

  const byConcern = list => { const out = new Map(); for (const x of list) { const c = x.concern || "other"; if (!out.has(c)) out.set(c, []); out.get(c).push(x) } return [...out].sort(([a], [b]) => rank(a) - rank(b)) };
  const rank = c => OPEN.includes(c) ? OPEN.indexOf(c) : c === "recipe" ? OPEN.length : OPEN.length + 1;

  function build() {
    const c = S.spec.controls, named = k => { const i = c.fixes.findIndex(f => k.name in f.on); return i < 0 ? 1e6 : i };  // those with a fix come first
    S.rows = new Map(); S.fixes = []; S.groups = [];
    note.hidden = !!c; note.textContent = c ? "" : "This run was made by an earlier version, which did not store what its knobs may be: they are shown, and cannot be changed from here. Start it with Trainer.open to steer it.";
    fixes.box.hidden = !c?.fixes.length; filter.hidden = !c;
    fixes.body.replaceChildren(...byConcern(c?.fixes ?? []).flatMap(([concern, list]) => [make("div", "mp-caption", concern), ...list.map(f => { const r = fixRow(f); S.fixes.push(r); return r.box })]));
    knobs.body.replaceChildren(...(c ? byConcern(Object.entries(c.knobs).map(([name, info]) => ({ name, info, concern: info.concern })).sort((a, b) => named(a) - named(b))).map(group) : []));
    if (!c) plainValues();
    drawGroups();
  }

  function group([concern, list]) {
    const box = make("div", "mp-group"), open = S.folded[concern] ?? OPEN.includes(concern), fold = make("button", "mp-fold", undefined, { type: "button", "aria-expanded": open }), count = make("span", "mp-muted"), body = make("div", "mp-rows");
    fold.append(make("span", "", concern), count); box.append(fold, body);
    const g = { concern, box, fold, count, body, rows: list.map(({ name, info }) => { const r = knobRow(name, info); S.rows.set(name, r); body.append(r.box); return r }) };
    fold.onclick = () => { S.folded[concern] = body.hidden; drawGroups() };
    S.groups.push(g);
    return box;
  }

  function drawGroups() {
    const q = filter.value.trim().toLowerCase();
    for (const g of S.groups) {
      const hits = g.rows.filter(r => { const hit = !q || [r.knob, r.info.help, g.concern].some(t => String(t ?? "").toLowerCase().includes(q)); r.box.hidden = !hit; return hit }).length;
      const open = q ? hits > 0 : S.folded[g.concern] === undefined ? OPEN.includes(g.concern) : S.folded[g.concern];
      g.box.hidden = !hits; g.body.hidden = !open; g.fold.setAttribute("aria-expanded", open);
    }
    nothing.hidden = !q || S.groups.some(g => !g.box.hidden);
    if (nothing.parentNode !== knobs.body) knobs.body.append(nothing);
    say(nothing, `no knob holds “${filter.value.trim()}”`);
  }
  const nothing = make("div", "mp-empty");

  function plainValues() {  // of a run whose knobs are not described
    knobs.body.replaceChildren(...Object.keys(S.values).sort().map(k => { const r = make("div", "mp-row"), line = make("div", "mp-line"); line.append(make("span", "mp-cut", k), make("span", "mp-fate mp-cut", told(S.values[k]))); r.append(line); return r }));
  }

  function drawRows() {
    if (!S.spec) return;
    if (readOnly()) return plainValues();
    for (const r of S.fixes) drawFix(r);
    for (const r of S.rows.values()) draw(r);
    for (const g of S.groups) { const n = g.rows.filter(r => r.box.dataset.differs === "true").length; say(g.count, n ? `${n} not at the default` : "") }
    say(fixes.count, `${S.fixes.filter(r => r.box.dataset.state === "on").length} of ${S.fixes.length} on`);
  }

  // -- log --

  const levels = make("select", "", undefined, { "aria-label": "Levels shown" }), kinds = make("select", "", undefined, { "aria-label": "Kinds shown" }), log = section("Log", true, [levels, kinds]);
  const list = make("div", "mp-log", undefined, { role: "log", "aria-label": "Events and changes, newest first", "aria-live": "off", tabindex: 0 }), items = make("div"), older = make("button", "mp-older", "older", { type: "button" }), silent = make("div", "mp-empty", "nothing happened yet");
  for (const [value, text] of [["", "all levels"], ["warning", "warnings"], ["error", "errors"]]) levels.append(make("option", "", text, { value }));
  kinds.append(make("option", "", "all kinds", { value: "" }));
  list.append(items, silent, older); log.body.append(list); log.body.style.padding = 0;
  older.onclick = () => { older.disabled = true; later(() => { older.disabled = false }, 1500); ask("older") };
  levels.onchange = kinds.onchange = () => sift();

  function item(line) {
    let e = S.items.get(line.key);
    if (!e) { e = make("div", "mp-item"); e.at = make("time"); e.what = make("div"); e.kind = make("b"); e.meta = make("span", "mp-muted"); e.text = make("div"); e.what.append(e.kind, e.meta, e.text); e.append(e.at, e.what); S.items.set(line.key, e) }
    const steps = line.first === null ? "" : line.first === line.last ? ` step ${whole(line.last)}` : ` steps ${whole(line.first)}–${whole(line.last)}`;
    e.dataset.level = line.level; e.dataset.kind = line.kind; e.place = line.place;
    say(e.at, clock(line.time), new Date(1000 * line.time).toLocaleString()); say(e.kind, line.kind); say(e.meta, `${line.count > 1 ? ` ×${whole(line.count)},` : line.first === null ? "" : ","}${steps}`); say(e.text, line.text);
    return e;
  }

  function drawLog(lines, all) {
    if (all) { S.items.clear(); items.replaceChildren() }
    for (const line of [...lines].sort((a, b) => a.place - b.place)) {
      const known = S.items.has(line.key), e = item(line);
      if (known) continue;
      let next = items.firstChild;
      while (next && next.place > line.place) next = next.nextSibling;
      items.insertBefore(e, next);
    }
    while (items.children.length > MOST) { const e = items.lastChild; for (const [k, v] of S.items) if (v === e) S.items.delete(k); e.remove() }
    const have = [...new Set([...S.items.values()].map(e => e.dataset.kind))].sort(), was = kinds.value;
    if (have.join("\0") !== S.kinds) { S.kinds = have.join("\0"); kinds.replaceChildren(...["", ...have].map(k => make("option", "", k || "all kinds", { value: k }))); kinds.value = have.includes(was) ? was : "" }
    sift();
  }

  function sift() {
    let shown = 0;
    for (const e of items.children) { e.hidden = !((!kinds.value || e.dataset.kind === kinds.value) && (!levels.value || e.dataset.level === levels.value || levels.value === "warning" && e.dataset.level === "error")); if (!e.hidden) shown++ }
    say(silent, S.items.size ? "nothing of this kind in these lines" : "nothing happened yet"); silent.hidden = shown > 0; older.hidden = !S.more;
    say(log.count, S.items.size ? `${whole(S.items.size)} line${S.items.size > 1 ? "s" : ""}` : "");
  }

  // -- messages --

  const hear = {
    spec(m) { const fresh = JSON.stringify([m.name, m.controls]); if (S.built !== fresh) { S.built = fresh; S.spec = m; build() } root.setAttribute("aria-label", `Panel of the run ${m.name}`); drawHead(); drawRows() },
    head(m) { const before = S.head.state; S.head = m; drawHead(); drawButtons(); if (m.state !== before) drawRows() },
    can(m) { S.can = m.buttons; S.doing = m.doing; S.aside = S.doing ? "" : S.aside; remark(S.aside, S.aside ? "warn" : "muted"); drawButtons() },
    values(m) { S.values = m.all ? m.values : { ...S.values, ...m.values }; drawRows() },
    changes(m) { S.changes = m.all ? m.changes : { ...S.changes, ...m.changes }; settle(); drawRows() },
    proofs(m) { S.proofs = m.rows; for (const r of S.fixes) drawFix(r) },
    log(m) { S.more = m.more; drawLog(m.lines, m.all) },
    checkpoints(m) { S.kept = m.rows; drawKept(); drawButtons() },
    trouble(m) { drawTrouble(m.items) },
    answer(m) { proof.answer(m); if (m.request === S.waiting) { S.waiting = null; remark(m.text ?? "", m.ok ? "muted" : "bad") } if (!m.ok) { for (const [k, w] of Object.entries(S.mine)) if (w.request === m.request) delete S.mine[k]; drawRows() } },
    beat() {},
  };

  function onMessage(m) {
    alive.heard(); root.dataset.messages = Number(root.dataset.messages ?? 0) + 1;
    if (Object.hasOwn(hear, m?.t)) hear[m.t](m);
  }

  function cut(off) {  // the kernel that this panel belonged to is gone: nothing that is pressed here could reach anybody
    S.dead = off; root.dataset.dead = off;
    for (const e of [buttons, last, restore, fixes.body, knobs.body, older]) e.inert = off;
    remark(off ? "The kernel of this panel is gone. Run its cell again." : "", off ? "warn" : "muted");
    drawHead();
  }
  const alive = life(model, () => { if (alive.dead !== S.dead) cut(alive.dead); else drawHead() }), watch = setInterval(drawKept, 2000), rest = make("div", "mp-rest");

  rest.append(note, fixes.box, knobs.box, log.box);
  root.append(head, buttons, until, restore, trouble, rest);
  el.append(style, root);
  drawHead(); drawButtons(); sift();
  model.on("msg:custom", onMessage);
  past.tell(onMessage);
  alive.insist(() => ask("hello"), () => S.spec || !root.isConnected);
  return () => { model.off("msg:custom", onMessage); alive.stop(); clearInterval(watch); for (const t of timers) clearTimeout(t) };
}

export default () => {
  const past = memory();
  return {
    initialize({ model }) { model.on("msg:custom", past.keep) },  // no message passes before this
    render: ({ model, el }) => view({ model, el, past }),
  };
};
