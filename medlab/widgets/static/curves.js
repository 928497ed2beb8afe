// Curves of one or several runs. The kernel sends what is to be drawn over the visible steps; nothing is kept in the notebook.
// Names and texts of runs reach the page through textContent and fillText only. life.js, which stands before this, says whether the kernel speaks.
//
// From the kernel:  spec {groups: [{title, log, names, ticks}], runs: [name], labels: {name: label}, smooth, opens: [kind]}
//                   data {run, x: [first, last], range, request, last, series: [[name, kind, pairs, marks, last value]]} + float32 pairs
//                   marks {run, marks: [{kind, step, last, count, label, text, level}]}, status {runs: [{state, fault}], note}
//                   arms: see arms.js, which stands before this. It speaks when it is made and when it is displayed, before the page has a view, and hears no page while a cell runs.
// To the kernel:    view {hello, range: null | [first, last], width, request}, mark {run, kind, first, last, at}: a click on one of the kinds of `opens`, "nan" for what is not finite

const LIGHT = ["#2368a8", "#c2570c", "#2e8540", "#7a4bb0", "#b3325a", "#1f8a99"], DARK = ["#6cb2f5", "#f5a55a", "#7ed492", "#c09df0", "#f58aa4", "#66cfdd"];
const TONES = { light: { error: "#d62728", warning: "#b36b00", info: "#6b7280", change: "#7a4bb0" }, dark: { error: "#ff6b6b", warning: "#f0b040", info: "#9aa3b2", change: "#c09df0" } };
const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3]], FLAG = [[1, "NaN"], [2, "+inf"], [4, "−inf"], [8, "no value"]];
const FONT = 11, PAD = { left: 52, right: 10, top: 8, bottom: 20 };  // pixels

const CSS = `
.medlab-curves { --mc-bg: var(--jp-layout-color0, #fff); --mc-fg: var(--jp-ui-font-color1, #222); --mc-muted: var(--jp-ui-font-color2, #666); --mc-line: var(--jp-border-color2, #ddd);
  --mc-brand: var(--jp-brand-color1, #1976d2); box-sizing: border-box; padding: 8px 10px; font: 12px/1.4 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--mc-fg); background: var(--mc-bg); border: 1px solid var(--mc-line); border-radius: 4px }
.medlab-curves * { box-sizing: border-box }
.mc-bar { display: flex; align-items: center; gap: 6px 10px; min-height: 26px; flex-wrap: wrap }
.mc-runs { display: flex; gap: 4px 8px; flex: 1 1 300px; min-width: 0; flex-wrap: wrap }
.mc-bar label { display: flex; align-items: center; gap: 6px; color: var(--mc-muted) }
.mc-bar input { width: 90px; accent-color: var(--mc-brand) }
.mc-bar .mc-arms { gap: 4px } .mc-bar .mc-arms button { color: var(--mc-fg); padding: 0 4px }
.mc-bar select { font: inherit; color: var(--mc-fg); background: var(--mc-bg); border: 1px solid var(--mc-line); border-radius: 3px; height: 22px; max-width: 170px }
.mc-arm { display: inline-flex; align-items: center; gap: 5px; height: 20px; padding: 0 4px; max-width: 100%; min-width: 0 }
.mc-number { display: inline-block; min-width: 4ch; text-align: right; font-variant-numeric: tabular-nums }
.mc-note { height: 18px; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; color: var(--mc-muted); font-variant-numeric: tabular-nums }
.mc-note.mc-bad { color: var(--jp-error-color1, #c62828) }
.medlab-curves [hidden] { display: none !important }
.mc-folded { display: flex; flex-wrap: wrap; gap: 2px 6px; margin: 2px 0 0 -4px }
.mc-grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(var(--medlab-curve-width, 310px), 100%), 1fr)); gap: 8px 20px; margin-top: 4px }
.mc-panel { min-width: 0 }
.mc-head { display: flex; align-items: baseline; gap: 8px; height: 22px }
.mc-title { font-weight: 600; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.mc-say { flex: 1; min-width: 0; color: var(--mc-muted); font-size: 11px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.mc-panel canvas { display: block; width: 100%; height: var(--medlab-curve-height, 144px); cursor: crosshair; touch-action: pan-y; outline-offset: 1px }
.mc-legend { display: flex; flex-wrap: wrap; gap: 2px 8px; min-height: 22px; margin-left: -4px; white-space: nowrap }
.medlab-curves button { font: inherit; color: inherit; background: none; border: 1px solid transparent; border-radius: 3px; padding: 0 4px; cursor: pointer; white-space: nowrap; height: 20px; display: inline-flex; align-items: center; gap: 5px; max-width: 40ch }
.medlab-curves button:hover:enabled { border-color: var(--mc-line) }
.medlab-curves button.mc-plain { border-color: var(--mc-line); padding: 0 8px }
.medlab-curves button:disabled { opacity: .45; cursor: default }
.medlab-curves button[aria-pressed=false] { opacity: .45 }
.medlab-curves :focus-visible { outline: 2px solid var(--mc-brand) }
.mc-legend button { max-width: 100%; min-width: 0; }
.mc-name { overflow: hidden; text-overflow: ellipsis }
.mc-swatch { flex: none; width: 14px; height: 0; border-top: 2.5px solid }
.mc-value, .mc-state { color: var(--mc-muted); font-variant-numeric: tabular-nums }
.mc-value { min-width: 6.5ch; text-align: left }`;

function make(tag, name, text) {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text !== undefined) e.textContent = text;
  return e;
}

function number(v, digits = 4) {
  if (!Number.isFinite(v)) return Number.isNaN(v) ? "–" : v > 0 ? "+inf" : "−inf";
  const a = Math.abs(v), tidy = s => s.replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  if (a && (a < 1e-3 || a >= 1e6)) return tidy(v.toExponential(digits - 1)).replace("e-", "e−");
  return Number(v.toPrecision(a >= 1e4 ? 6 : digits)).toLocaleString("en-US", { maximumFractionDigits: 10 }).replace("-", "−");
}

function short(v) {  // for an axis
  const a = Math.abs(v);
  if (a >= 1e4 && a < 1e9) return a >= 1e6 ? Number((v / 1e6).toPrecision(4)) + "M" : Number((v / 1e3).toPrecision(4)) + "k";
  if (a && (a < 1e-3 || a >= 1e9)) return v.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replace("e-", "e−");
  return String(Number(v.toPrecision(6))).replace("-", "−");
}

const whole = v => Math.round(v).toLocaleString("en-US");

function nice(lo, hi, n) {  // ticks at round numbers
  const raw = (hi - lo) / n, e = 10 ** Math.floor(Math.log10(raw)), f = raw / e, step = (f > 5 ? 10 : f > 2 ? 5 : f > 1 ? 2 : 1) * e, out = [];
  for (let k = Math.ceil(lo / step); k * step <= hi + step * 1e-9; k++) out.push(k * step);
  return out;
}

function decades(lo, hi) {  // ticks of a logarithmic axis; round numbers where it spans less than two decades
  const a = Math.ceil(Math.log10(lo) - 1e-9), b = Math.floor(Math.log10(hi) + 1e-9), every = Math.max(1, Math.ceil((b - a + 1) / 5)), out = [];
  if (b - a < 2) {
    const fine = [];
    for (let k = a - 1; k <= b; k++) for (const m of [1, 2, 5]) { const v = m * 10 ** k; if (v >= lo && v <= hi) fine.push(v) }
    return fine.length > 1 ? fine : nice(lo, hi, 4).filter(v => v > 0);
  }
  for (let k = a; k <= b; k += every) out.push(10 ** k);
  return out;
}

// ---- series: pairs (step − first, value), or (low, high) of columns ----

function unpack(bytes, at, [name, kind, pairs, marks, last], x) {
  const f = new Float32Array(bytes, at, 2 * pairs), m = new Float32Array(bytes, at + 8 * pairs, 2 * marks), flag = new Uint8Array(pairs);
  if (kind !== "ticks") for (let i = 0; i < marks; i++) flag[m[2 * i]] = m[2 * i + 1];
  const wide = (x[1] - x[0] || 1) / (pairs || 1), columns = kind === "columns";
  return { name, kind, last, n: pairs, flag, step: columns ? i => x[0] + (i + 0.5) * wide : i => x[0] + f[2 * i], low: columns ? i => f[2 * i] : i => f[2 * i + 1], high: i => f[2 * i + 1] };
}

function nearest(s, step) {  // index of the row nearest to a step, or −1
  let lo = 0, hi = s.n - 1;
  if (hi < 0) return -1;
  while (hi - lo > 1) { const k = (lo + hi) >> 1; if (s.step(k) <= step) lo = k; else hi = k }
  const full = k => s.flag[k] || !Number.isNaN(s.low(k)), best = Math.abs(s.step(hi) - step) < Math.abs(s.step(lo) - step) ? hi : lo;
  for (let d = 0; d < 40; d++) { if (best - d >= 0 && full(best - d)) return best - d; if (best + d < s.n && full(best + d)) return best + d }
  return -1;
}

function reading(s, i) {
  if (i < 0) return "–";
  const what = FLAG.filter(([bit]) => s.flag[i] & bit).map(([, t]) => t).join(", "), lo = s.low(i), hi = s.high(i);
  const value = Number.isNaN(lo) ? "" : lo === hi ? number(lo) : `${number(lo, 3)} … ${number(hi, 3)}`;
  return [value, what].filter(Boolean).join(", ") || "–";
}

function jitters(s, weight) {  // whether an average helps: five windows of values or more, that go up and down
  if (s.n * (1 - weight) < 5) return false;
  let turns = 0, n = 0, before = NaN, rise = 0;
  for (let k = 0; k < s.n; k++) {
    const v = s.low(k) + s.high(k);
    if (Number.isNaN(v)) continue;
    if (v !== before && !Number.isNaN(before)) { const up = v > before ? 1 : -1; if (rise && up !== rise) turns++; rise = up }
    before = v; n++;
  }
  return turns > 0.1 * n;
}

// ---- the widget ----

// The last message of each kind and run; a view that comes later is told them.
function memory() {
  const last = new Map();
  return {
    keep(m, buffers) { last.set(JSON.stringify([m.t, m.run]), [m, buffers]) },
    tell(heard) { for (const [m, buffers] of last.values()) heard(m, buffers) },
  };
}

function view({ model, el, kept }) {
  const S = { spec: null, runs: [], marks: [], status: [], note: "", range: null, asked: null, hidden: new Set(), unfolded: new Set(), log: {}, smooth: 0, cursor: null, over: null, drag: null, panels: [], count: 0 };
  const root = make("div", "medlab-curves"), style = make("style"), bar = make("div", "mc-bar"), note = make("div", "mc-note"), folded = make("div", "mc-folded"), grid = make("div", "mc-grid");
  style.textContent = CSS;
  root.setAttribute("role", "group"); root.setAttribute("aria-label", "Curves of training runs");
  note.setAttribute("role", "status");
  const runs = make("div", "mc-runs"), all = make("button", "mc-plain", "All steps"), smoothing = make("label"), slider = make("input"), shown = make("span", "mc-number", "0");
  Object.assign(slider, { type: "range", min: 0, max: 0.98, step: 0.01, value: 0 });
  slider.setAttribute("aria-label", "Smoothing: weight of the moving average over the drawn columns");
  smoothing.append("Smoothing", slider, shown);
  all.disabled = true; all.title = "Show all steps (double click, Escape or 0)";
  folded.setAttribute("role", "group"); folded.setAttribute("aria-label", "Metrics that have not changed; a click shows the curve");
  const arm = armsOf(m => { try { model.send(m) } catch { } }, (a, b) => zoom(a, b), () => { if (S.range) ask(null) });
  bar.append(runs, arm.box, smoothing, all); root.append(bar, note, folded, grid); el.append(style, root);
  let frame = 0, colours = null, styled = false;

  const kick = () => { if (!frame) frame = requestAnimationFrame(draw) };
  const off = (...k) => S.hidden.has(JSON.stringify(k));
  const toggle = (...k) => { const s = JSON.stringify(k); S.hidden.has(s) ? S.hidden.delete(s) : S.hidden.add(s); legends(); kick() };

  function theme() {  // before the page holds us there are no styles yet
    styled = root.isConnected;
    const css = getComputedStyle(root), get = k => css.getPropertyValue(k).trim(), c = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    c.fillStyle = get("--mc-bg") || "#fff"; c.fillRect(0, 0, 1, 1);
    const [r, g, b] = c.getImageData(0, 0, 1, 1).data, dark = 0.3 * r + 0.6 * g + 0.1 * b < 128;
    root.dataset.theme = dark ? "dark" : "light";
    colours = { fg: get("--mc-fg"), muted: get("--mc-muted"), line: get("--mc-line"), bg: get("--mc-bg"), brand: get("--mc-brand"), series: dark ? DARK : LIGHT, tone: dark ? TONES.dark : TONES.light, font: css.fontFamily };
  }

  const several = () => S.spec.runs.length > 1;
  const lead = () => S.panels.find(p => !p.box.hidden) ?? S.panels[0];  // the first panel on view
  const look = (run, i) => several() ? { colour: colours.series[run % 6], dash: DASHES[i % 4] } : { colour: colours.series[i % 6], dash: DASHES[Math.floor(i / 6) % 4] };

  function ask(range, hello = false) {
    S.range = range; S.asked = Math.random().toString(36).slice(2);
    all.disabled = !range; root.dataset.range = range ? range.join(" ") : "";
    tell(S.asked, hello, 1000);
    kick();
  }

  function tell(request, hello, wait) {  // until it is answered: words may be lost, or wait for a cell to end
    clearTimeout(S.timer);
    const panel = lead(), across = panel ? panel.canvas.clientWidth : 0, width = across ? Math.round(across - PAD.left - PAD.right) : 480;
    S.width = root.dataset.width = across;
    try { model.send({ t: "view", hello, range: S.range, width: Math.max(50, Math.min(4096, width)), request }) } catch { return }  // the kernel is gone, and this model with it
    S.timer = setTimeout(() => { if (S.asked === request) tell(request, hello, Math.min(2 * wait, 30000)) }, wait);
  }

  function span() {  // first and last step on view
    if (S.range) return S.range;
    const have = S.runs.filter((d, r) => d && d.x && !off("run", r)), x = have.length ? have : S.runs.filter(d => d && d.x);
    if (!x.length) return [0, 1];
    const a = Math.min(...x.map(d => d.x[0])), b = Math.max(...x.map(d => d.x[1]));
    return a < b ? [a, b] : [a - 0.5, b + 0.5];
  }

  // -- structure: built once for each spec --

  function build() {
    const before = new Map(S.panels.map(p => [p.title, p]));
    S.panels = S.spec.groups.map((group, i) => before.get(group.title) ?? panel(group));
    S.panels.forEach((p, i) => { p.group = S.spec.groups[i]; p.entries = null });
    if (S.panels.some((p, i) => grid.children[i] !== p.box) || grid.children.length !== S.panels.length) grid.replaceChildren(...S.panels.map(p => p.box));
    arrange(); legends();
  }

  function panel(group) {
    const box = make("section", "mc-panel"), head = make("div", "mc-head"), say = make("span", "mc-say"), fold = make("button", "mc-plain", "fold"), log = make("button", "mc-plain", "log"), canvas = make("canvas"), legend = make("div", "mc-legend");
    const p = { title: group.title, group, box, say, fold, canvas, legend, entries: null, still: false };
    S.log[p.title] ??= group.log;
    log.setAttribute("aria-label", `Logarithmic axis: ${group.title}`);
    const press = () => log.setAttribute("aria-pressed", S.log[p.title]);
    press(); log.onclick = () => { S.log[p.title] = !S.log[p.title]; press(); kick() };
    fold.title = "It has not changed: show it as a number"; fold.setAttribute("aria-label", `Fold ${group.title}`); fold.onclick = () => { S.unfolded.delete(p.title); arrange(); kick() };
    canvas.tabIndex = 0; canvas.setAttribute("role", "img"); canvas.setAttribute("aria-roledescription", "chart");
    legend.setAttribute("role", "group"); legend.setAttribute("aria-label", `Legend: ${group.title}`);
    head.append(make("span", "mc-title", group.title), say, fold, log); box.append(head, canvas, legend);
    pointer(p); keys(p); seen.observe(canvas);
    return p;
  }

  // -- what does not move is a number, until somebody wants to see it or it moves --

  function standing(p) {  // whether nothing of a group has another value than at first; of all steps, so that a zoom changes no layout
    if (!S.runs.some(d => d && d.x[1] > d.x[0])) return false;  // before the second step everything stands still
    for (const d of S.runs) {
      if (!d) continue;
      if (p.group.ticks && d.series.get(p.group.ticks)?.n) return false;
      for (const name of p.group.names) {
        const s = d.series.get(name);
        let first = NaN;
        for (let k = 0; s && k < s.n; k++) {
          if (s.flag[k] & 7) return false;
          const lo = s.low(k), hi = s.high(k);
          if (Number.isNaN(lo)) continue;
          if (Number.isNaN(first)) first = lo;
          if (lo !== first || hi !== first) return false;
        }
      }
    }
    return true;
  }

  function arrange() {  // which panels are curves, and which are numbers
    const chips = [];
    for (const p of S.panels) {
      if (!S.range) p.still = standing(p);
      const one = p.still && !S.unfolded.has(p.title);
      p.box.hidden = one; p.fold.hidden = !p.still;
      if (one) chips.push(chip(p));
    }
    root.dataset.many = S.panels.filter(p => !p.box.hidden).length > 6;
    if (folded.dataset.said !== JSON.stringify(chips)) { folded.dataset.said = JSON.stringify(chips); folded.replaceChildren(...chips.map(([title, text]) => unfold(title, text))) }
    folded.hidden = !chips.length;
  }

  function chip(p) {  // [title, numbers], a number for each metric of each run
    const of = name => S.runs.map((d, r) => d && !off("run", r) && d.series.get(name)).filter(Boolean).map(s => number(s.last ?? NaN)).join(" | ");
    const have = p.group.names.map(name => [S.spec.labels[name] ?? name, of(name)]).filter(([, v]) => v);
    return [p.title, have.map(([label, v]) => have.length > 1 ? `${label} ${v}` : v).join("  ") || "–"];
  }

  function unfold(title, text) {
    const b = make("button"), value = make("span", "mc-value", text);
    b.title = `${title} has not changed; a click shows the curve`; b.setAttribute("aria-label", `Show the curve of ${title}`); b.setAttribute("aria-expanded", false);
    b.append(make("span", "", title), value); b.dataset.group = title;
    b.onclick = () => { S.unfolded.add(title); arrange(); kick(); S.panels.find(p => p.title === title)?.canvas.focus({ preventScroll: true }) };
    return b;
  }

  function entry(text, label, pressed, onclick) {
    const b = make("button"), swatch = make("span", "mc-swatch"), name = make("span", "mc-name", text), value = make("span", "mc-value");
    b.setAttribute("aria-label", label); b.setAttribute("aria-pressed", pressed); b.title = label; b.onclick = onclick;
    b.append(swatch, name, value);
    return { b, swatch, value };
  }

  function legends() {
    if (!S.spec) return;
    if (!colours || !styled) theme();
    const held = document.activeElement?.getAttribute?.("aria-label"), within = root.contains(document.activeElement);
    runs.replaceChildren(...S.spec.runs.map((name, r) => {
      const e = entry(name, `Show or hide run ${name}`, !off("run", r), () => toggle("run", r));
      e.swatch.style.borderTopColor = several() ? look(r, 0).colour : "transparent";
      if (!several()) { e.swatch.remove(); e.b.style.fontWeight = 600 }
      e.value.className = "mc-state"; S.spec.states ??= []; S.spec.states[r] = e.value;
      return e.b;
    }));
    for (const p of S.panels) {
      p.entries = p.group.names.map((name, i) => {
        const label = S.spec.labels[name] ?? name, e = entry(label, `Show or hide ${label}`, !off(p.title, name), () => toggle(p.title, name)), { colour, dash } = look(0, i);
        e.swatch.style.borderTopColor = several() ? colours.muted : colour; e.swatch.style.borderTopStyle = dash.length ? dash[0] > 2 ? "dashed" : "dotted" : "solid";
        return e;
      });
      p.legend.replaceChildren(...p.entries.map(e => e.b), ...arm.legend(p, colours));
    }
    if (within && held) [...root.querySelectorAll("button")].find(b => b.getAttribute("aria-label") === held)?.focus();
    said();
  }

  // -- marks that can be clicked --

  const REACH = 6;  // pixels
  const across = p => p.canvas.clientWidth - PAD.left - PAD.right;

  function hit(p, step) {  // the mark that is meant at a step: an event, or else a value that is not finite
    const opens = S.spec?.opens ?? [], [a, b] = span(), reach = REACH * (b - a) / Math.max(1, across(p));
    if (!opens.length || step === null) return null;
    const off_by = (first, last) => Math.max(first - step, step - last, 0);
    let best = null;
    const offer = (run, kind, first, last, text) => { const d = off_by(first, last); if (d <= reach && (!best || d < best.d)) best = { d, run, kind, first, last, text } };
    S.marks.forEach((list, run) => { if (!off("run", run)) for (const m of list ?? []) if (opens.includes(m.kind)) offer(run, m.kind, m.step, m.last, m.text) });
    if (!best && opens.includes("nan")) for (const { s, r } of curves(p)) {
      const wide = s.kind === "columns" ? (S.runs[r].x[1] - S.runs[r].x[0]) / (s.n || 1) / 2 : 0;
      for (let k = 0; k < s.n; k++) if (s.flag[k] & 7) offer(r, "nan", Math.floor(s.step(k) - wide), Math.ceil(s.step(k) + wide), `${S.spec.labels[s.name] ?? s.name}: ${reading(s, k)}`);
    }
    return best;
  }

  function click(p, step) {
    const found = hit(p, step);
    if (!found) return;
    const { run, kind, first, last } = found;
    root.dataset.clicked = `${kind} ${first}`;
    try { model.send({ t: "mark", run, kind, first, last, at: Math.max(first, Math.min(last, step)) }) } catch { return }  // the kernel is gone
    follow(root.closest(".medlab-parts")?.querySelector(".medlab-fault"));
  }

  function follow(shown) {  // what a click opens is brought into sight as it comes, until the reader goes elsewhere
    S.following?.();
    if (!shown) return;
    const grown = new ResizeObserver(() => { if (shown.clientHeight) shown.scrollIntoView({ block: "nearest", behavior: "smooth" }) });
    const end = () => { grown.disconnect(); clearTimeout(timer); for (const k of ["wheel", "pointerdown", "keydown"]) document.removeEventListener(k, end, true) };
    const timer = setTimeout(end, 60_000);
    grown.observe(shown); S.following = end;
    setTimeout(() => { for (const k of ["wheel", "pointerdown", "keydown"]) document.addEventListener(k, end, true) });
  }

  // -- what the user does --

  const toStep = (p, e) => { const [a, b] = span(), box = p.canvas.getBoundingClientRect(), w = box.width - PAD.left - PAD.right; return a + Math.max(0, Math.min(1, (e.clientX - box.left - PAD.left) / w)) * (b - a) };

  function pointer(p) {
    const c = p.canvas;
    c.addEventListener("pointerdown", e => { if (e.button) return; c.setPointerCapture(e.pointerId); S.drag = { p, from: toStep(p, e), x: e.clientX } });
    c.addEventListener("pointermove", e => { S.cursor = toStep(p, e); S.over = S.drag ? null : hit(p, S.cursor); c.style.cursor = S.over ? "pointer" : ""; kick() });
    c.addEventListener("pointerleave", () => { if (!S.drag) { S.cursor = S.over = null; kick() } });
    c.addEventListener("pointercancel", () => { S.drag = null; kick() });
    c.addEventListener("pointerup", e => {
      const d = S.drag, to = toStep(p, e);
      S.drag = null;
      if (d && Math.abs(e.clientX - d.x) > 5) zoom(Math.min(d.from, to), Math.max(d.from, to)); else { if (d) click(p, to); kick() }
    });
    c.addEventListener("dblclick", () => { if (S.range) ask(null) });
  }

  function zoom(a, b) {
    a = Math.round(a); b = Math.round(b);
    if (b - a < 2) { const m = Math.round((a + b) / 2); a = m - 1; b = m + 1 }
    ask([a, b]);
  }

  function keys(p) {
    p.canvas.addEventListener("keydown", e => {
      const [a, b] = span(), w = b - a, at = S.cursor ?? (a + b) / 2, k = e.key;
      if (k === "Escape" || k === "0") { if (S.range) ask(null) }
      else if (k === "Enter" && S.spec?.opens?.length) click(p, S.cursor);
      else if (k === "+" || k === "=") zoom(at - w / 4, at + w / 4);
      else if (k === "-") zoom(Math.max(0, at - w), at + w);
      else if (k.startsWith("Arrow") && (k === "ArrowLeft" || k === "ArrowRight")) {
        const s = k === "ArrowLeft" ? -1 : 1;
        if (e.shiftKey) zoom(Math.max(0, a + s * w / 4), Math.max(w, b + s * w / 4)); else { S.cursor = Math.max(a, Math.min(b, at + s * w / 100)); S.over = hit(p, S.cursor); kick() }
      } else return;
      e.preventDefault(); e.stopPropagation();
    });
    p.canvas.addEventListener("blur", () => { S.cursor = S.over = null; kick() });
  }

  all.onclick = () => ask(null);
  slider.oninput = () => { S.smooth = Number(slider.value); shown.textContent = slider.value; kick() };

  // -- drawing --

  function draw() {
    frame = 0;
    if (!S.spec || !root.isConnected) return;
    if (!colours || !styled) { theme(); legends() }
    const hidden = S.panels.some(p => !p.box.hidden && !p.canvas.clientWidth);  // as while JupyterLab changes its theme
    if (!hidden) { for (const p of S.panels) paint(p); root.dataset.drawn = root.dataset.theme }
    S.tries = hidden ? (S.tries ?? 0) + 1 : 0;
    if (hidden && S.tries < 20) setTimeout(kick, 100);
    said();
  }

  function* curves(p) {
    for (let r = 0; r < S.runs.length; r++) if (S.runs[r] && !off("run", r)) for (let i = 0; i < p.group.names.length; i++) {
      const s = S.runs[r].series.get(p.group.names[i]);
      if (s && s.name !== "loss" && arm.alone(p, span())) continue;
      if (s && !off(p.title, s.name)) yield { s, r, i, ...look(r, i) };
    }
  }

  function limits(p, x) {  // of the values on view
    let lo = Infinity, hi = -Infinity, least = Infinity, below = 0;
    for (const { s } of curves(p)) for (let k = 0; k < s.n; k++) {
      const t = s.step(k), u = s.low(k), v = s.high(k);
      if (Number.isNaN(u) || t < x[0] && !(k + 1 < s.n && s.step(k + 1) >= x[0]) || t > x[1] && !(k && s.step(k - 1) <= x[1])) continue;
      if (u < lo) lo = u; if (v > hi) hi = v; if (u > 0 && u < least) least = u; else if (v > 0 && v < least) least = v;
      if (u <= 0) below++;
    }
    for (const v of arm.values(p, x)) { if (v < lo) lo = v; if (v > hi) hi = v; if (v > 0 && v < least) least = v }
    const log = S.log[p.title] && hi > 0, empty = hi < lo;
    if (empty) { lo = 0; hi = 1 }
    if (log && !empty) { lo = Math.log(least); hi = Math.log(hi) }
    const thin = 0.02 * (log ? 1 : Math.max(Math.abs(lo), Math.abs(hi)));  // an axis spans a fiftieth of its values at least
    if (hi > lo && hi - lo < thin) { const middle = (lo + hi) / 2; lo = middle - thin / 2; hi = middle + thin / 2 }
    const pad = hi > lo ? 0.06 * (hi - lo) : log ? 0.7 : Math.abs(hi) * 0.1 || 1;
    return { log: log && !empty, lo: lo - pad, hi: hi + pad, empty, below: log ? below : 0 };
  }

  function paint(p) {
    const c = p.canvas, ratio = window.devicePixelRatio || 1, W = c.clientWidth, H = c.clientHeight, g = c.getContext("2d");
    if (!W || !H) return;
    if (c.width !== Math.round(W * ratio) || c.height !== Math.round(H * ratio)) { c.width = Math.round(W * ratio); c.height = Math.round(H * ratio) }
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, W, H);
    const x = span(), y = limits(p, x), box = { l: PAD.left, r: W - PAD.right, t: PAD.top, b: H - PAD.bottom };
    const X = t => box.l + (t - x[0]) / (x[1] - x[0]) * (box.r - box.l), Y = v => { const u = y.log ? (v > 0 ? Math.log(v) : -Infinity) : v; return Math.max(box.t - 4, Math.min(box.b, box.b - (u - y.lo) / (y.hi - y.lo) * (box.b - box.t))) };
    const m = { g, p, x, y, X, Y, box };
    axes(m);
    g.save(); g.beginPath(); g.rect(box.l, box.t - 6, box.r - box.l, box.b - box.t + 6); g.clip();
    vertical(m);
    for (const curve of curves(p)) line(m, curve);
    arm.draw(m, colours);
    ticks(m); labels(m);
    if (y.empty) nothing(m);
    g.restore();
    let bad = 0;
    for (const curve of curves(p)) bad += wrong(m, curve);
    overlay(m);
    p.say.textContent = [y.below && `${y.below} at or below 0, off the logarithmic axis`, bad && `${bad} not finite`, arm.alone(p, x) && p.group.names.length > 1 && "without its parts"].filter(Boolean).join(" · ");
    p.say.title = p.say.textContent;
    p.canvas.setAttribute("aria-label", `${p.title}, steps ${whole(x[0])} to ${whole(x[1])}${y.empty ? ", nothing recorded yet" : ""}. Arrow keys read values, plus and minus zoom, 0 shows all steps.`);
  }

  function axes({ g, p, x, y, X, Y, box }) {
    g.font = `${FONT}px ${colours.font}`; g.lineWidth = 1; g.textBaseline = "middle"; g.textAlign = "right";
    const values = y.empty ? [] : y.log ? decades(Math.exp(y.lo), Math.exp(y.hi)) : nice(y.lo, y.hi, 4);
    const texts = values.map(short), tight = new Set(texts).size < texts.length || texts.some(t => g.measureText(t).width > box.l - 6);  // a narrow range far from zero
    values.forEach((v, i) => {
      const at = Math.round(Y(v)) + 0.5, base = tight && !i;
      g.strokeStyle = colours.line; g.globalAlpha = 0.6; g.beginPath(); g.moveTo(box.l, at); g.lineTo(box.r, at); g.stroke(); g.globalAlpha = 1;
      g.fillStyle = colours.muted; g.textAlign = base ? "left" : "right";
      g.fillText(base ? String(Number(v.toPrecision(10))) : tight ? "+" + short(v - values[0]) : texts[i], base ? 1 : box.l - 6, base ? at - 7 : at);  // the lowest in full, the others from there
    });
    g.textBaseline = "top"; g.fillStyle = colours.muted;
    for (const v of nice(x[0], x[1], 5)) {
      if (v !== Math.round(v)) continue;
      const at = X(v), half = g.measureText(short(v)).width / 2;
      g.textAlign = at + half > box.r + 8 ? "right" : "center";
      g.fillText(short(v), g.textAlign === "right" ? box.r + 8 : at, box.b + 5);
      g.strokeStyle = colours.line; g.beginPath(); g.moveTo(Math.round(at) + 0.5, box.b); g.lineTo(Math.round(at) + 0.5, box.b + 3); g.stroke();
    }
    g.strokeStyle = colours.line; g.beginPath(); g.moveTo(box.l, box.b + 0.5); g.lineTo(box.r, box.b + 0.5); g.stroke();
  }

  function nothing({ g, box }) {  // no mark goes through the words
    const text = "nothing recorded yet", x = (box.l + box.r) / 2, y = (box.t + box.b) / 2;
    g.font = `${FONT}px ${colours.font}`; g.textAlign = "center"; g.textBaseline = "middle";
    const half = g.measureText(text).width / 2 + 4;
    g.fillStyle = colours.bg; g.fillRect(x - half, y - 9, 2 * half, 18);
    g.fillStyle = colours.muted; g.fillText(text, x, y);
  }

  const tone = m => m.kind === "change" ? colours.tone.change : colours.tone[m.level] ?? colours.tone.info;

  const visible = x => S.marks.flatMap((list, r) => off("run", r) ? [] : list ?? []).filter(m => m.last >= x[0] && m.step <= x[1]).sort((a, b) => a.step - b.step);
  const near = (m, x) => S.cursor !== null && S.cursor >= m.step - (x[1] - x[0]) / 80 && S.cursor <= m.last + (x[1] - x[0]) / 80;

  function vertical({ g, x, X, box }) {  // changes and guards that acted
    for (const m of visible(x)) {
      const a = X(m.step), b = X(m.last), at = Math.round(a) + 0.5;
      g.strokeStyle = g.fillStyle = tone(m);
      if (b - a > 2) { g.globalAlpha = 0.13; g.fillRect(a, box.t, b - a, box.b - box.t) }
      g.globalAlpha = 0.8; g.setLineDash([4, 3]); g.beginPath(); g.moveTo(at, box.t); g.lineTo(at, box.b); g.stroke(); g.setLineDash([]); g.globalAlpha = 1;
    }
  }

  function labels({ g, p, x, X, box }) {  // in the first row of panels, where they are high; elsewhere of the line under the cursor
    const row = box.b - box.t > 80 && p.box.offsetTop === lead().box.offsetTop;  // in a low panel they would hide the curve
    let free = -Infinity;
    g.font = `${FONT}px ${colours.font}`;
    for (const m of visible(x)) {
      const at = Math.round(X(m.step)) + 0.5, right = at > box.r - 14, begins = right ? at - 15 : at;  // at the right edge it stands left of its line
      if (!near(m, x) && (!row || begins < free)) continue;
      const times = m.count > 1 ? ` ×${m.count}` : "", text = clip(g, m.label, box.b - box.t - 8 - g.measureText(times).width) + times;
      g.save(); g.translate(right ? at - 4 : at + 11, box.t + 1); g.rotate(-Math.PI / 2); g.textAlign = "right"; g.textBaseline = "alphabetic";
      g.fillStyle = tone(m); g.lineWidth = 3.5; g.lineJoin = "round"; g.strokeStyle = colours.bg; g.strokeText(text, 0, 0); g.fillText(text, 0, 0); g.restore();
      free = at + 14;
    }
  }

  function clip(g, text, width) {
    if (g.measureText(text).width <= width) return text;
    while (text.length > 2 && g.measureText(text + "…").width > width) text = text.slice(0, -1);
    return text + "…";
  }

  function line({ g, x, y, X, Y }, { s, colour, dash }) {
    g.strokeStyle = g.fillStyle = colour; g.setLineDash(dash); g.lineWidth = 1.2; g.lineJoin = "round"; const smooth = S.smooth && jitters(s, S.smooth); g.globalAlpha = smooth ? 0.32 : 1;
    const alone = [];
    let run = 0, last = null;
    g.beginPath();
    for (let k = 0; k < s.n; k++) {
      const lo = s.low(k), hi = s.high(k);
      if (s.flag[k] && Number.isNaN(lo)) { if (run === 1) alone.push(last); run = 0; continue }
      if (Number.isNaN(lo)) continue;  // a column without a step
      const at = X(s.step(k)), a = Y(lo), b = Y(hi);
      last = [at, b];
      run++ ? g.lineTo(at, a) : g.moveTo(at, a);
      if (lo !== hi) { g.lineTo(at, b); run++ }
    }
    if (run === 1) alone.push(last);
    g.stroke(); g.setLineDash([]);
    const few = s.kind === "points" && s.n <= 60;
    for (let k = 0; few && k < s.n; k++) if (!s.flag[k]) alone.push([X(s.step(k)), Y(s.low(k))]);
    for (const [u, v] of alone) { g.beginPath(); g.arc(u, v, 2, 0, 7); g.fill() }
    g.globalAlpha = 1;
    if (smooth) smoothed({ g, y, X, Y }, s);
  }

  function smoothed({ g, y, X, Y }, s) {  // exponential average of the columns' middles, without its bias to 0
    let mean = 0, weight = 1, started = false;
    g.lineWidth = 2; g.beginPath();
    for (let k = 0; k < s.n; k++) {
      const lo = s.low(k), hi = s.high(k);
      if (Number.isNaN(lo) || (y.log && lo <= 0)) continue;
      const v = y.log ? (Math.log(lo) + Math.log(hi)) / 2 : (lo + hi) / 2;
      mean = S.smooth * mean + (1 - S.smooth) * v; weight *= S.smooth;
      const u = mean / (1 - weight), at = X(s.step(k)), h = Y(y.log ? Math.exp(u) : u);
      started ? g.lineTo(at, h) : g.moveTo(at, h);
      started = true;
    }
    g.stroke(); g.lineWidth = 1;
  }

  function wrong({ g, x, X, box }, { s }) {  // what is not finite: red, at the edge
    let count = 0, free = -Infinity;
    for (let k = 0; k < s.n; k++) {
      const flag = s.flag[k], t = s.step(k);
      if (!(flag & 7) || t < x[0] || t > x[1]) continue;
      count++;
      const at = X(t);
      if (at < free) continue;
      free = at + 3; g.fillStyle = g.strokeStyle = colours.tone.error;
      if (flag & 4) { g.beginPath(); g.moveTo(at - 3.5, box.b - 6); g.lineTo(at + 3.5, box.b - 6); g.lineTo(at, box.b); g.fill() }
      if (flag & 2) { g.beginPath(); g.moveTo(at - 3.5, box.t); g.lineTo(at + 3.5, box.t); g.lineTo(at, box.t - 6); g.fill() }
      if (flag & 1) { g.lineWidth = 1.8; g.beginPath(); g.moveTo(at - 3, box.t - 6); g.lineTo(at + 3, box.t); g.moveTo(at + 3, box.t - 6); g.lineTo(at - 3, box.t); g.stroke(); g.lineWidth = 1 }
    }
    return count;
  }

  function ticks({ g, p, X, box }) {  // skipped steps
    if (!p.group.ticks) return;
    g.strokeStyle = colours.tone.error; g.lineWidth = 1.5;
    S.runs.forEach((d, r) => {
      const s = d && !off("run", r) && d.series.get(p.group.ticks);
      if (!s) return;
      g.beginPath();
      for (let k = 0; k < s.n; k++) { const at = X(s.step(k)); g.moveTo(at, box.b); g.lineTo(at, box.b - 9) }
      g.stroke();
    });
    g.lineWidth = 1;
  }

  function overlay({ g, p, X, Y, x, box }) {  // cursor and selection
    const values = new Map();
    if (S.drag) { const a = X(S.drag.from), b = X(S.cursor ?? S.drag.from); g.globalAlpha = 0.16; g.fillStyle = colours.brand; g.fillRect(Math.min(a, b), box.t, Math.abs(b - a), box.b - box.t); g.globalAlpha = 1 }
    if (S.cursor !== null && S.cursor >= x[0] && S.cursor <= x[1]) { const at = Math.round(X(S.cursor)) + 0.5; g.strokeStyle = colours.muted; g.beginPath(); g.moveTo(at, box.t); g.lineTo(at, box.b); g.stroke() }
    for (const { s, i, r, colour } of curves(p)) {
      const k = S.cursor === null ? -1 : nearest(s, S.cursor);
      if (k >= 0 && !Number.isNaN(s.high(k))) { g.fillStyle = colour; g.beginPath(); g.arc(X(s.step(k)), Y(s.high(k)), 3, 0, 7); g.fill() }
      values.set(i, [...(values.get(i) ?? []), S.cursor !== null ? reading(s, k) : S.range ? reading(s, nearest(s, x[1])) : number(s.last ?? NaN)]);
    }
    p.entries?.forEach((e, i) => { e.value.textContent = values.has(i) ? values.get(i).join(" | ") : "" });
  }

  function said() {  // the line below the bar: trouble first, then what is under the cursor
    S.status.forEach((s, r) => { if (S.spec?.states?.[r]) Object.assign(S.spec.states[r], { title: alive.why(s.state) }).textContent = [alive.word(s.state), S.runs[r]?.last !== undefined && S.runs[r]?.last !== null ? `step ${whole(S.runs[r].last)}` : ""].filter(Boolean).join(", ") });
    const trouble = [S.note, ...S.status.map(s => s.fault)].filter(Boolean).join(" · ");
    note.classList.toggle("mc-bad", !!trouble);
    let text = trouble;
    if (!text && S.cursor !== null) {
      const [a, b] = span(), reach = (b - a) / 100, near = S.marks.flatMap((list, r) => (list ?? []).map(m => [m, r])).filter(([m, r]) => !off("run", r) && S.cursor >= m.step - reach && S.cursor <= m.last + reach);
      text = `step ${whole(S.cursor)}` + near.slice(0, 3).map(([m, r]) => ` · ${several() ? S.spec.runs[r] + ": " : ""}${m.count > 1 ? `${m.label} ×${m.count}, steps ${whole(m.step)} to ${whole(m.last)}` : `step ${whole(m.step)}: ${m.text}`}`).join("");
      if (S.over) text = `Click for the sample · ${text}${S.over.kind === "nan" ? ` · ${S.over.text}` : ""}`;
    }
    if (!text && S.range) text = `steps ${whole(S.range[0])} to ${whole(S.range[1])}`;
    if (!text) text = "Drag to zoom, double click for all steps.";
    if (note.textContent !== text) { note.textContent = text; note.title = text }
  }

  // -- what the kernel says --

  function heard(m, buffers) {
    alive.heard();
    if (m.t === "spec") {
      const first = !S.spec;
      S.spec = { ...m };  // its own: other views are told the same message
      if (first) { S.smooth = m.smooth; slider.value = m.smooth; shown.textContent = String(m.smooth) }
      build();
      if (first) requestAnimationFrame(() => ask(S.range, true));
    }
    else if (m.t === "data") {
      const v = buffers[0], bytes = v.buffer ? v.buffer.slice(v.byteOffset, v.byteOffset + v.byteLength) : v, series = new Map();
      let at = 0;
      for (const s of m.series) { series.set(s[0], unpack(bytes, at, s, m.x)); at += 8 * (s[2] + (s[1] === "ticks" ? 0 : s[3])) }
      S.runs[m.run] = { x: m.x, last: m.last, series };
      if (m.request === S.asked) S.asked = null;
      if (!S.asked) { S.range = m.range; all.disabled = !m.range; root.dataset.range = m.range ? m.range.join(" ") : "" }  // another view of the same widget may have zoomed
      arrange();
      root.dataset.answered = m.range ? m.range.join(" ") : ""; root.dataset.updates = ++S.count; root.dataset.last = m.last; root.dataset.request = m.request;
    } else if (m.t === "arms") { arm.hear(m); legends() }
    else if (m.t === "marks") S.marks[m.run] = m.marks;
    else if (m.t === "status") { S.status = m.runs; S.note = m.note }
    kick();
  }

  const alive = life(model, () => { root.dataset.dead = alive.dead; kick() });
  const seen = new ResizeObserver(() => {
    kick();
    const panel = lead(), width = panel ? panel.canvas.clientWidth : 0;
    if (!width || Math.abs(width - S.width) < 0.1 * width) return;
    clearTimeout(S.resized);
    S.resized = setTimeout(() => { if (root.isConnected) ask(S.range) }, 300);  // columns of the width that is seen
  }), dressed = new MutationObserver(() => { colours = null; if (S.spec) legends(); kick() });
  dressed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
  model.on("msg:custom", heard);
  kept.tell(heard);
  ask(S.range, true);
  return () => { S.following?.(); model.off("msg:custom", heard); alive.stop(); seen.disconnect(); dressed.disconnect(); cancelAnimationFrame(frame); clearTimeout(S.timer); clearTimeout(S.resized) };
}

export default () => {
  const kept = memory();
  return {
    initialize({ model }) { model.on("msg:custom", kept.keep) },  // no message passes before this
    render: ({ model, el }) => view({ model, el, kept }),
  };
};
