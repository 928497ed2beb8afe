// The browser's half of medlab.widgets.viewer: slices, grey levels, overlays and the cursor, on 2D canvases.
//
// Arrays arrive once per page as binary messages {type: "array", id, kind, size, low, step, special, serial, at, bytes}, in pieces; value = low + step · code.
// A page says {type: "ready", page, want} and hears {type: "hello", page}; what it has drawn it answers with {type: "drawn", serial}.
// The planes on the screen arrive before them, as {type: "planes", id, kind, low, step, special, planes: [[axis, index], …]}.
// The model holds only the state of the view. Text from data goes into the page through textContent and setAttribute, never as HTML.

const NAN = 65535, POSITIVE = 65534, NEGATIVE = 65533;  // codes of what is no number, see `Codes` in viewer.py
const BAD = [0, 255, 0], RED = [178, 24, 43], BLUE = [33, 102, 172];
const STATE = ["cursor", "centre", "zoom", "windows", "linked", "frame", "planes", "difference", "limit", "opacities", "hidden", "outline", "crosshair", "radiological"];
const HELP = "drag: cursor · right drag: window (↔ width, ↕ level) · Shift drag: pan · wheel: slice · Ctrl wheel: zoom · double click: whole picture · keys: ← → ↑ ↓ cursor, Page Up/Down slice, + − zoom, 0 whole picture, o overlays, x cross";

const CSS = `
.medlab-viewer { --fg: var(--jp-ui-font-color1, #212121); --dim: var(--jp-ui-font-color2, #616161); --line: var(--jp-border-color2, #c4c4c4); --bg: var(--jp-layout-color1, #fff);
  --accent: var(--jp-brand-color1, #1976d2); --bad: var(--jp-error-color1, #d32f2f); color: var(--fg); font: 12px/1.4 var(--jp-ui-font-family, system-ui, sans-serif); user-select: none; padding: 2px; }
.medlab-viewer * { box-sizing: border-box; }
.medlab-viewer .mv-bar { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 7px; min-height: 28px; margin-bottom: 4px; }
.medlab-viewer .mv-group { display: inline-flex; align-items: center; gap: 4px; max-width: 100%; }
.medlab-viewer .mv-right { margin-left: auto; }
.medlab-viewer button, .medlab-viewer select, .medlab-viewer input[type=number] { font: inherit; color: var(--fg); background: var(--bg); border: 1px solid var(--line); border-radius: 3px; height: 24px; padding: 0 7px; margin: 0; }
.medlab-viewer select { max-width: 118px; padding: 0 2px; }
.medlab-viewer input[type=number] { width: 52px; padding: 0 3px; appearance: textfield; }
.medlab-viewer input::-webkit-inner-spin-button { appearance: none; margin: 0; }
.medlab-viewer input[type=checkbox] { margin: 0; accent-color: var(--accent); }
.medlab-viewer input[type=range] { width: 90px; height: 16px; margin: 0; accent-color: var(--accent); }
.medlab-viewer input[type=range].mv-wide { width: 260px; max-width: 100%; }
.medlab-viewer button { cursor: pointer; }
.medlab-viewer button:hover { border-color: var(--dim); }
.medlab-viewer .mv-joined { display: inline-flex; }
.medlab-viewer .mv-joined button { border-radius: 0; margin-left: -1px; }
.medlab-viewer .mv-joined button:first-child { border-radius: 3px 0 0 3px; margin-left: 0; }
.medlab-viewer .mv-joined button:last-child { border-radius: 0 3px 3px 0; }
.medlab-viewer button[aria-pressed=true] { background: var(--accent); border-color: var(--accent); color: var(--jp-ui-inverse-font-color0, #fff); }
.medlab-viewer label { display: inline-flex; align-items: center; gap: 4px; color: var(--dim); }
.medlab-viewer :is(button, select, input, canvas):focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.medlab-viewer .mv-text { max-width: 220px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--fg); }
.medlab-viewer .mv-chip { display: inline-flex; align-items: center; gap: 5px; border-color: transparent; padding: 0 5px; max-width: 180px; }
.medlab-viewer .mv-chip i { width: 10px; height: 10px; border-radius: 2px; flex: none; }
.medlab-viewer .mv-chip[aria-pressed] { background: transparent; border-color: transparent; color: var(--fg); }
.medlab-viewer .mv-chip[aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.medlab-viewer .mv-columns { display: flex; gap: 6px; align-items: flex-start; }
.medlab-viewer .mv-columns.mv-stacked { flex-direction: column; }
.medlab-viewer .mv-column { display: flex; flex-direction: column; gap: 2px; min-width: 0; }
.medlab-viewer .mv-title { height: 18px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 600; }
.medlab-viewer .mv-planes { display: flex; gap: 6px; }
.medlab-viewer .mv-planes.mv-stacked { flex-direction: column; }
.medlab-viewer canvas { display: block; background: #000; box-shadow: 0 0 0 1px var(--line); cursor: crosshair; touch-action: none; }
.medlab-viewer .mv-status { margin-top: 5px; font-variant-numeric: tabular-nums; }
.medlab-viewer .mv-status div { height: 18px; overflow: hidden; text-overflow: ellipsis; white-space: pre; }
.medlab-viewer .mv-note { color: var(--dim); }
.medlab-viewer .mv-note.mv-alarm { color: var(--bad); }
.medlab-viewer .mv-help { color: var(--dim); margin-top: 4px; max-width: 110ch; }
`;

// An element with attributes, listeners ("on…") and children; strings become text.
function h(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) {
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (v !== false && v != null) e.setAttribute(k, v === true ? "" : v);
  }
  e.append(...children);
  return e;
}

const put = (e, text) => { if (e.textContent !== text) e.textContent = text; };  // a page is laid out again only where something changed
const name = (e, k, v) => { if (e.getAttribute(k) !== String(v)) e.setAttribute(k, v); };
const clamp = (v, lo, hi) => Math.max(lo, Math.min(hi, v));

// A message's bytes as a typed array; bits become bytes.
function unpack({ kind, size }, view) {
  if (kind === "bits") {
    const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength), out = new Uint8Array(size);
    for (let i = 0; i < size; i++) out[i] = (bytes[i >> 3] >> (7 - (i & 7))) & 1;
    return out;
  }
  const type = { u1: Uint8Array, u2: Uint16Array, f4: Float32Array }[kind];
  const aligned = view.byteOffset % type.BYTES_PER_ELEMENT === 0;
  return aligned ? new type(view.buffer, view.byteOffset, size) : new type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// The value of a code.
function decode(a, c) {
  if (a.special && c >= NEGATIVE) return c === NAN ? NaN : c === POSITIVE ? Infinity : -Infinity;
  return a.low + a.step * c;
}

// The array and code of a voxel [z, y, x]: of a plane that came ahead, of the whole, or none yet.
function codeAt(a, v, n) {
  const early = a.planes.find(e => e.at === v[e.axis]);
  if (early) { const [i, j] = [0, 1, 2].filter(k => k !== early.axis); return [early, early.codes[v[i] * n[j] + v[j]]]; }
  return a.codes ? [a, a.codes[(v[0] * n[1] + v[1]) * n[2] + v[2]]] : null;
}

// A number with the digits its array can vouch for.
function digits(v, a) {
  if (Number.isNaN(v)) return "NaN";
  if (!Number.isFinite(v)) return v > 0 ? "+Inf" : "−Inf";
  const integer = a.codes.BYTES_PER_ELEMENT < 4 && a.step === 1 && Number.isInteger(a.low);
  const big = v !== 0 && (Math.abs(v) >= 1e7 || Math.abs(v) < 1e-4);
  const text = integer ? v.toFixed(0) : big ? v.toExponential(3) : a.codes.BYTES_PER_ELEMENT === 4 ? String(Number(v.toPrecision(6))) : v.toFixed(clamp(Math.ceil(-Math.log10(a.step)), 0, 8));
  return text.replace("-", "−");
}

function view({ model, el, arrays, listeners }) {
  const get = k => model.get(k);
  let scene = get("_scene"), built = "", tool = "cursor", hover = null, active = 0, frames = 0, request = 0, width = 0, plans = new Map(), limits = new Map(), acknowledge = 0, arrivals = 0, showHelp = false, lastWheel = 0;
  const root = h("div", { class: "medlab-viewer", "data-lm-suppress-shortcuts": "true", role: "group", "aria-label": "volume viewer", onkeydown: e => e.stopPropagation() });
  el.append(h("style", {}, CSS), root);
  let ui = {};

  // ---- state ----
  let saving = 0, saved = 0;
  function save() {  // at most 20 messages a second, and the last one always
    if (saving) return;
    saving = setTimeout(() => { saving = 0; saved = performance.now(); model.save_changes(); }, Math.max(0, 50 - (performance.now() - saved)));
  }
  function set(k, v) { model.set(k, v); save(); }  // the change draws
  const steps = () => scene.step, shape = () => scene.shape.map((n, i) => Math.ceil(n / scene.step[i]));  // of what crossed
  const mm = () => scene.spacing.map((s, i) => s * scene.step[i]);
  const at = () => get("cursor").map((c, i) => Math.floor(c / scene.step[i]));
  function moveTo(p) { const n = shape(); set("cursor", p.map((v, i) => clamp(Math.round(v), 0, n[i] - 1) * scene.step[i])); }
  const arrayOf = v => arrays.get(v.ids[Math.min(get("frame"), v.ids.length - 1)]);
  const panelsShown = () => scene.panels.filter(p => get("planes").includes(p.name));
  const windowOf = k => get("windows")[k] || scene.volumes[k].auto;
  const reference = () => scene.volumes.findIndex(v => v.name === get("difference"));
  const turned = p => p.flip_right !== (get("radiological") && p.letters.startsWith("L"));
  function setWindow(i, lo, hi) {
    if (!(hi > lo) || !Number.isFinite(hi - lo)) return;
    set("windows", get("windows").map((w, k) => (get("linked") || k === i ? [lo, hi] : w)));
  }

  // ---- slices ----
  function plan(p) {  // offset of every pixel of a plane from its first voxel
    const n = shape(), key = [p.cut, p.up, p.right, p.flip_up, turned(p), ...n].join();
    if (!plans.has(p.name) || plans.get(p.name).key !== key) {
      const strides = [n[1] * n[2], n[2], 1], rows = n[p.up], columns = n[p.right], flat = p.up < p.right ? [columns, 1] : [1, rows];
      const offsets = (up, right) => {
        const out = new Int32Array(rows * columns);
        for (let r = 0, o = 0; r < rows; r++) {
          const u = (p.flip_up ? r : rows - 1 - r) * up;
          for (let c = 0; c < columns; c++) out[o++] = u + (turned(p) ? columns - 1 - c : c) * right;
        }
        return out;
      };
      plans.set(p.name, { key, rows, columns, offset: offsets(strides[p.up], strides[p.right]), flat: offsets(...flat), stride: strides[p.cut], values: new Float32Array(rows * columns), other: new Float32Array(rows * columns) });
    }
    return plans.get(p.name);
  }

  // Where a plane's codes are: in a plane that came ahead, or in the whole array; null where neither is here.
  function source(a, p, q, cursor) {
    if (!a) return null;
    const early = a.planes.find(e => e.axis === p.cut && e.at === cursor[p.cut]);
    return early ? { a: early, base: 0, offset: q.flat } : a.codes ? { a, base: cursor[p.cut] * q.stride, offset: q.offset } : null;
  }

  function read({ a: { codes, low, step, special }, base, offset }, out) {
    const n = offset.length;
    if (special) for (let i = 0; i < n; i++) { const c = codes[base + offset[i]]; out[i] = c >= NEGATIVE ? NaN : low + step * c; }
    else for (let i = 0; i < n; i++) out[i] = low + step * codes[base + offset[i]];
  }

  function grey(v, d, lo, hi) {
    const k = 255 / (hi - lo);
    for (let i = 0, o = 0; i < v.length; i++, o += 4) {
      const x = v[i];
      if (x - x !== 0) { d[o] = BAD[0]; d[o + 1] = BAD[1]; d[o + 2] = BAD[2]; } else d[o] = d[o + 1] = d[o + 2] = (x - lo) * k;
      d[o + 3] = 255;
    }
  }

  function diverging(v, w, d, limit) {  // v − w: blue, white, red
    for (let i = 0, o = 0; i < v.length; i++, o += 4) {
      const x = (v[i] - w[i]) / limit;
      if (x - x !== 0) { d[o] = BAD[0]; d[o + 1] = BAD[1]; d[o + 2] = BAD[2]; }
      else { const t = Math.min(1, Math.abs(x)), c = x > 0 ? RED : BLUE; d[o] = 255 + (c[0] - 255) * t; d[o + 1] = 255 + (c[1] - 255) * t; d[o + 2] = 255 + (c[2] - 255) * t; }
      d[o + 3] = 255;
    }
  }

  function mixIn(overlay, opacity, hidden, from, columns, d) {
    if (!from || !(opacity > 0)) return;
    const alpha = new Float32Array(256), rgb = new Uint8Array(768), outline = get("outline"), { a: { codes }, base, offset } = from;
    for (const [label, , color] of overlay.legend) { alpha[label] = hidden.includes(label) ? 0 : outline ? 1 : opacity; rgb.set(color, 3 * label); }
    for (let i = 0, o = 0, n = offset.length; i < n; i++, o += 4) {
      const l = codes[base + offset[i]], f = alpha[l];
      if (f === 0) continue;
      if (outline) {  // a voxel inside is one whose four neighbours have its label
        const c = i % columns, same = j => codes[base + offset[j]] === l;
        if (c > 0 && c < columns - 1 && i >= columns && i < n - columns && same(i - 1) && same(i + 1) && same(i - columns) && same(i + columns)) continue;
      }
      for (let k = 0; k < 3; k++) d[o + k] = d[o + k] * (1 - f) + rgb[3 * l + k] * f;
    }
  }

  function ownLimit(k, r) {  // 99.5th percentile of |difference| of a sample
    const a = arrayOf(scene.volumes[k]), b = arrayOf(scene.volumes[r]), known = limits.get(k);
    if (known && known.a === a && known.b === b) return known.limit;
    if (!a || !b || !a.codes || !b.codes) return known ? known.limit : 0;
    const n = a.codes.length, every = Math.max(1, Math.floor(n / 100000)), size = [];
    for (let p = 0; p < n; p += every) { const d = Math.abs(decode(a, a.codes[p]) - decode(b, b.codes[p])); if (Number.isFinite(d)) size.push(d); }
    size.sort((x, y) => x - y);
    const limit = size[Math.floor(0.995 * (size.length - 1))] || size[size.length - 1] || 0;
    limits.set(k, { a, b, limit });
    return limit;
  }
  function limitOf(k, r) {  // the user's choice, or one for all columns as for the window, or each column's own
    if (get("limit") > 0) return get("limit");
    return (get("linked") ? Math.max(...scene.volumes.map((v, i) => (i === r ? 0 : ownLimit(i, r)))) : ownLimit(k, r)) || 1;
  }

  // ---- where a plane lies on its canvas: pixel = origin + scale · mm, rows downwards ----
  function layout(canvas, p) {
    const s = mm(), q = plan(p), ratio = canvas.width / (parseFloat(canvas.style.width) || 1), zoom = get("zoom"), scale = ui.scale * zoom * ratio;
    const size = [q.columns * s[p.right], q.rows * s[p.up]];
    const place = (axis, flip, n) => { const v = get("centre")[axis] / scene.step[axis] + 0.5; return (flip ? n - v : v) * s[axis]; };
    const middle = zoom > 1 ? [place(p.right, turned(p), q.columns), place(p.up, !p.flip_up, q.rows)] : [size[0] / 2, size[1] / 2];
    return { x: canvas.width / 2 - middle[0] * scale, y: canvas.height / 2 - middle[1] * scale, scale, ratio, s, q };
  }
  function voxelAt(canvas, p, event) {  // fractional voxel under the pointer, or null
    const box = canvas.getBoundingClientRect(), l = layout(canvas, p), out = at();
    const c = ((event.clientX - box.left) / box.width * canvas.width - l.x) / l.scale / l.s[p.right], r = ((event.clientY - box.top) / box.height * canvas.height - l.y) / l.scale / l.s[p.up];
    out[p.right] = (turned(p) ? l.q.columns - c : c) - 0.5;
    out[p.up] = (p.flip_up ? r : l.q.rows - r) - 0.5;
    return { voxel: out, inside: c >= 0 && c < l.q.columns && r >= 0 && r < l.q.rows };
  }

  // The plane's own pixels; the work is done again only where something changed.
  function paintPlane(panel, q, cursor) {
    const { p, k } = panel, r = reference(), from = source(arrayOf(scene.volumes[k]), p, q, cursor), other = r >= 0 && r !== k ? source(arrayOf(scene.volumes[r]), p, q, cursor) : null;
    if (!from || (r >= 0 && r !== k && !other)) return false;
    const layers = scene.overlays.map((o, i) => [o, get("opacities")[i] ?? 0, get("hidden")[i] || []]).filter(([o, f]) => f > 0 && (o.on < 0 || o.on === k)).map(([o, f, hidden]) => [o, f, hidden, source(arrays.get(o.id), p, q, cursor)]);
    const inputs = [q, from.a.codes, from.base, other && other.a.codes, other ? limitOf(k, r) : windowOf(k).join(), get("outline"), ...layers.flatMap(([o, f, hidden, s]) => [o, f, hidden.join(), s && s.a.codes])];
    if (panel.inputs && panel.inputs.length === inputs.length && inputs.every((v, i) => v === panel.inputs[i])) return true;
    if (!panel.off || panel.off.width !== q.columns || panel.off.height !== q.rows) { panel.off = h("canvas", { width: q.columns, height: q.rows }); panel.context = panel.off.getContext("2d"); panel.image = panel.context.createImageData(q.columns, q.rows); }
    const d = panel.image.data;
    read(from, q.values);
    if (other) { read(other, q.other); diverging(q.values, q.other, d, limitOf(k, r)); } else grey(q.values, d, ...windowOf(k));
    for (const [o, f, hidden, s] of layers) mixIn(o, f, hidden, s, q.columns, d);
    panel.context.putImageData(panel.image, 0, 0);
    panel.inputs = inputs;
    return true;
  }

  function drawPanel(panel) {
    const { canvas, p, k } = panel, g = canvas.getContext("2d", { alpha: false }), l = layout(canvas, p), q = l.q, cursor = at(), complete = paintPlane(panel, q, cursor);
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.fillStyle = "#000"; g.fillRect(0, 0, canvas.width, canvas.height);
    g.imageSmoothingEnabled = false;
    if (complete) g.drawImage(panel.off, l.x, l.y, q.columns * l.s[p.right] * l.scale, q.rows * l.s[p.up] * l.scale);
    if (complete && get("crosshair")) drawCross(g, canvas, p, l, cursor);
    drawLetters(g, canvas, p, l.ratio, cursor, complete ? "" : "waiting for the data …");
    name(canvas, "aria-label", `${p.name} plane of ${scene.volumes[k].name || "the volume"}, slice ${cursor[p.cut] * scene.step[p.cut]} of ${scene.shape[p.cut]}`);
    return complete;
  }

  function drawCross(g, canvas, p, l, cursor) {
    const c = turned(p) ? l.q.columns - 1 - cursor[p.right] : cursor[p.right], r = p.flip_up ? cursor[p.up] : l.q.rows - 1 - cursor[p.up];
    const x = l.x + (c + 0.5) * l.s[p.right] * l.scale, y = l.y + (r + 0.5) * l.s[p.up] * l.scale, gap = 7 * l.ratio;
    g.lineWidth = l.ratio; g.strokeStyle = "rgba(255, 214, 0, 0.75)";
    g.beginPath();
    for (const [x0, y0, x1, y1] of [[x, 0, x, y - gap], [x, y + gap, x, canvas.height], [0, y, x - gap, y], [x + gap, y, canvas.width, y]]) { g.moveTo(x0, y0); g.lineTo(x1, y1); }
    g.stroke();
  }

  function drawLetters(g, canvas, p, ratio, cursor, waiting) {
    const w = canvas.width, b = canvas.height, pad = 5 * ratio, letters = p.letters && turned(p) !== p.flip_right ? p.letters[1] + p.letters[0] + p.letters.slice(2) : p.letters;
    const text = (t, x, y, align, base, size, weight) => {
      g.font = `${weight} ${size * ratio}px system-ui, sans-serif`; g.textAlign = align; g.textBaseline = base;
      g.lineWidth = 3 * ratio; g.lineJoin = "round"; g.strokeStyle = "rgba(0, 0, 0, 0.85)"; g.strokeText(t, x, y); g.fillStyle = "#fff"; g.fillText(t, x, y);
    };
    if (letters) { text(letters[0], pad, b / 2, "left", "middle", 12, 700); text(letters[1], w - pad, b / 2, "right", "middle", 12, 700); text(letters[2], w / 2, b - pad, "center", "bottom", 12, 700); text(letters[3], w / 2, pad, "center", "top", 12, 700); }
    if (!scene.flat) text(`${p.letters ? p.name + "  " : ""}${"zyx"[p.cut]} ${cursor[p.cut] * scene.step[p.cut]}`, pad, pad, "left", "top", 11, 400);
    if (waiting) text(waiting, w / 2, b / 2 + 20 * ratio, "center", "middle", 12, 400);
  }

  // ---- status ----
  function status() {
    const own = hover ? hover.map(Math.round) : at(), n = shape();
    const p = own.map((v, i) => clamp(v, 0, n[i] - 1)), voxel = p.map((v, i) => v * scene.step[i]);
    const names = scene.flat ? [1, 2] : [0, 1, 2];
    let where = "";
    if (scene.affine) {
      const v = [voxel[2], voxel[1], voxel[0], 1], world = [0, 1, 2].map(r => scene.affine[r].reduce((sum, a, c) => sum + a * v[c], 0));
      where = world.map((m, i) => `${m < 0 ? "LPI"[i] : "RAS"[i]} ${Math.abs(m).toFixed(1)}`).join("   ") + " mm      ";
    } else if (scene.mm) where = names.map(i => `${"zyx"[i]} ${(voxel[i] * scene.spacing[i]).toFixed(1)}`).join("   ") + " mm      ";
    put(ui.where, `${where}${scene.flat ? "pixel (y, x)" : "voxel (z, y, x)"} = (${names.map(i => voxel[i]).join(", ")})${hover ? "" : "      at the cross"}`);
    const r = reference(), found = scene.volumes.map(v => { const a = arrayOf(v), c = a && codeAt(a, p, n); return c && [decode(...c), c[0]]; });
    const parts = scene.volumes.map((v, k) => {
      if (!found[k]) return `${v.name} …`;
      const [value, a] = found[k], minus = r >= 0 && r !== k && found[r] ? value - found[r][0] : null;
      return `${v.name || "value"} ${digits(value, a)}${minus === null ? "" : ` (${minus > 0 ? "+" : ""}${digits(minus, a)})`}`;
    });
    scene.overlays.forEach(o => {
      const a = arrays.get(o.id), c = a && codeAt(a, p, n), entry = c && c[1] && o.legend.find(e => e[0] === c[1]);
      if (entry) parts.push(`${o.name}: ${entry[1] || entry[0]}`);
    });
    put(ui.value, parts.join("   |   "));
    const lost = scene.volumes.filter(v => v.lost[0] + v.lost[1]).map(v => `${v.name || "volume"}: ${v.lost[0].toLocaleString("en")} NaN and ${v.lost[1].toLocaleString("en")} Inf voxels (green)`);
    const notes = [...lost, ...scene.notes].join("   ·   ");
    put(ui.note, notes); name(ui.note, "title", notes); ui.note.classList.toggle("mv-alarm", lost.length > 0);
  }

  // ---- drawing ----
  let stale = true;
  function kick() { stale = true; again(); }
  function again() { if (!request) request = requestAnimationFrame(draw); }
  function draw() {
    request = 0;
    if (!ui.panels || !width) return;
    const complete = ui.panels.map(drawPanel).every(Boolean);
    status();
    if (stale) { stale = false; controls(); }
    root.dataset.frames = ++frames;
    root.dataset.complete = complete; root.dataset.arrived = arrivals;
    if (acknowledge) { model.send({ type: "drawn", serial: acknowledge }); root.dataset.drawn = acknowledge; acknowledge = 0; }
  }
  function arrived(serial) { if (serial) acknowledge = serial; arrivals++; kick(); }

  // ---- controls ----
  const focused = e => document.activeElement === e;
  function controls() {
    const [lo, hi] = windowOf(active), short = v => (hi - lo < 1e-4 || hi - lo > 1e7 ? v.toPrecision(3) : String(Number(v.toFixed(clamp(Math.ceil(3 - Math.log10(hi - lo)), 0, 8)))));
    if (!focused(ui.level)) ui.level.value = short((lo + hi) / 2);
    if (!focused(ui.width)) ui.width.value = short(hi - lo);
    const preset = presets().findIndex(([, range]) => { const w = range(active); return w[0] === lo && w[1] === hi; });
    ui.preset.value = preset < 0 ? "" : String(preset);
    for (const [k, b] of Object.entries(ui.tools)) name(b, "aria-pressed", tool === k);
    for (const [k, b] of ui.planes) name(b, "aria-pressed", get("planes").includes(k));
    for (const [k, box] of ui.boxes) box.checked = get(k);
    if (ui.difference) ui.difference.value = String(reference());
    if (ui.sides) ui.sides.value = get("radiological") ? "radiological" : "neurological";
    if (ui.frame) { ui.frame.value = get("frame"); put(ui.frameName, frameName()); }
    ui.overlays.forEach(({ range, box, chips }, i) => {
      const o = get("opacities")[i], hidden = get("hidden")[i] || [];
      if (!focused(range)) range.value = o;
      box.checked = o > 0;
      for (const [label, chip] of chips) name(chip, "aria-pressed", !hidden.includes(label));
    });
    ui.titles.forEach((t, k) => {
      const r = reference(), own = scene.volumes[k].name, ready = r >= 0 && r !== k && arrayOf(scene.volumes[k]) && arrayOf(scene.volumes[r]);
      put(t, ready ? `${own} − ${scene.volumes[r].name}   ±${Number(limitOf(k, r).toPrecision(3))}` : own);
      name(t, "title", t.textContent);
    });
    ui.help.hidden = !showHelp;
  }
  const frameName = () => `${get("frame") + 1} / ${scene.frames}${scene.channels.length ? "  " + scene.channels[get("frame")] : ""}`;
  const presets = () => [["1–99 percentile", i => scene.volumes[i].auto], ["all values", i => { const [a, b] = scene.volumes[i].range; return a < b ? [a, b] : [a - 0.5, a + 0.5]; }], ...Object.entries(scene.presets).map(([name, range]) => [name, () => range])];
  const button = (text, title, onclick) => h("button", { type: "button", title, onclick }, text);

  function toolbar() {
    ui.tools = {};
    const tools = h("span", { class: "mv-joined", role: "group", "aria-label": "what a drag does" });
    for (const [name, text, title] of [["cursor", "Cursor", "drag moves the cursor"], ["window", "Window", "drag changes grey levels: ↔ width, ↕ level (as the right button)"], ["pan", "Pan", "drag moves the picture (as Shift)"]])
      tools.append((ui.tools[name] = button(text, title, () => { tool = name; kick(); })));
    ui.preset = h("select", { "aria-label": "window preset", onchange: e => { if (e.target.value !== "") setWindow(active, ...presets()[e.target.value][1](active)); } }, h("option", { value: "" }, "window …"), ...presets().map(([name], i) => h("option", { value: i }, name)));
    const typed = () => { const l = parseFloat(ui.level.value), w = parseFloat(ui.width.value); if (w > 0 && Number.isFinite(l)) setWindow(active, l - w / 2, l + w / 2); };
    const entered = e => { if (e.key === "Enter") { typed(); e.preventDefault(); } };  // JupyterLab keeps Enter from the field
    ui.level = h("input", { type: "number", step: "any", "aria-label": "window level", onchange: typed, onkeydown: entered });
    ui.width = h("input", { type: "number", step: "any", min: 0, "aria-label": "window width", onchange: typed, onkeydown: entered });
    ui.planes = new Map(scene.panels.map(p => [p.name, button({ axial: "Ax", coronal: "Cor", sagittal: "Sag" }[p.name] || p.name, `show the ${p.name} plane`, () => {
      const on = get("planes"), next = scene.panels.map(q => q.name).filter(q => (q === p.name ? !on.includes(q) : on.includes(q)));
      if (next.length) { set("planes", next); }
    })]));
    ui.boxes = new Map();
    const box = (k, text) => { const input = h("input", { type: "checkbox", onchange: e => set(k, e.target.checked) }); ui.boxes.set(k, input); return h("label", {}, input, text); };
    const many = scene.volumes.length > 1;
    if (many) ui.difference = h("select", { "aria-label": "difference", onchange: e => set("difference", e.target.value === "-1" ? "" : scene.volumes[e.target.value].name) }, h("option", { value: -1 }, "values"), ...scene.volumes.map((v, i) => h("option", { value: i }, `minus ${v.name}`)));
    else ui.difference = null;
    ui.sides = scene.affine ? h("select", { "aria-label": "sides", title: "radiological: the patient's right is on the left of axial and coronal planes; neurological: on the right", onchange: e => set("radiological", e.target.value === "radiological") }, h("option", { value: "radiological" }, "radiological"), h("option", { value: "neurological" }, "neurological")) : null;
    return h("div", { class: "mv-bar" }, tools, h("span", { class: "mv-group" }, ui.preset, h("label", {}, "L", ui.level), h("label", {}, "W", ui.width), ...(many ? [box("linked", "one for all")] : [])), ...(many ? [ui.difference] : []),
      ...(scene.flat ? [] : [h("span", { class: "mv-joined", role: "group", "aria-label": "planes" }, ...ui.planes.values())]), box("crosshair", "cross"), ...(scene.affine ? [ui.sides] : []),
      h("span", { class: "mv-group mv-right" }, button("Reset", "whole picture, no zoom", whole), button("?", "mouse and keys", () => { showHelp = !showHelp; kick(); })));
  }

  function overlayBar() {
    ui.overlays = [];
    if (!scene.overlays.length) return [];
    const bar = h("div", { class: "mv-bar" }), replace = (k, i, v) => set(k, get(k).map((o, j) => (j === i ? v : o)));
    scene.overlays.forEach((o, i) => {
      let before = get("opacities")[i] || 0.5;
      const box = h("input", { type: "checkbox", onchange: e => { if (!e.target.checked) before = get("opacities")[i] || before; replace("opacities", i, e.target.checked ? before : 0); } });
      const range = h("input", { type: "range", min: 0, max: 1, step: 0.05, "aria-label": `opacity of ${o.name}`, oninput: e => replace("opacities", i, parseFloat(e.target.value)) });
      const chips = o.legend.map(([label, name, rgb]) => {
        const square = h("i"), chip = h("button", { type: "button", class: "mv-chip", title: `label ${label}${name ? ": " + name : ""}; click to hide or show`, onclick: () => { const now = get("hidden")[i] || []; replace("hidden", i, now.includes(label) ? now.filter(l => l !== label) : [...now, label]); } }, square, h("span", { class: "mv-text" }, name || String(label)));
        square.style.background = `rgb(${rgb.map(Number).join(",")})`;
        return [label, chip];
      });
      ui.overlays.push({ box, range, chips });
      bar.append(h("span", { class: "mv-group" }, h("label", {}, box, h("span", { class: "mv-text", title: o.name }, o.name)), range), ...(o.legend.length > 24 ? [h("label", {}, `${o.legend.length} labels`)] : chips.map(c => c[1])));
    });
    const outline = h("input", { type: "checkbox", onchange: e => set("outline", e.target.checked) });
    ui.boxes.set("outline", outline);
    bar.append(h("label", {}, outline, "outlines"));
    return [bar];
  }

  function frameBar() {
    ui.frame = null;
    if (scene.frames < 2) return [];
    ui.frame = h("input", { type: "range", class: "mv-wide", min: 0, max: scene.frames - 1, step: 1, "aria-label": "channel or time", oninput: e => set("frame", parseInt(e.target.value, 10)) });
    ui.frameName = h("span", { class: "mv-text" });
    return [h("div", { class: "mv-bar" }, h("label", {}, "channel / time", ui.frame), ui.frameName)];
  }

  // ---- building and sizing ----
  const structure = () => JSON.stringify([scene.volumes.map(v => v.name), scene.overlays, scene.panels, scene.shape, scene.frames, get("planes")]);
  function build() {
    const where = root.contains(document.activeElement) ? [...root.querySelectorAll("*")].indexOf(document.activeElement) : -1;
    built = structure(); ui = { panels: [], titles: [], planesBoxes: [] }; plans = new Map(); limits = new Map(); active = Math.min(active, scene.volumes.length - 1);
    const many = scene.volumes.length > 1, columns = h("div", { class: "mv-columns" });
    ui.columns = columns;
    const bars = [toolbar(), ...overlayBar(), ...frameBar()];
    scene.volumes.forEach((v, k) => {
      const title = h("div", { class: "mv-title" }), planes = h("div", { class: "mv-planes" });
      for (const p of panelsShown()) { const canvas = h("canvas", { tabindex: 0, role: "img" }); listen(canvas, p, k); planes.append(canvas); ui.panels.push({ canvas, p, k }); }
      ui.titles.push(title); ui.planesBoxes.push(planes);
      columns.append(h("div", { class: "mv-column" }, ...(many || v.name ? [title] : []), planes));
    });
    ui.where = h("div"); ui.value = h("div"); ui.note = h("div", { class: "mv-note" }); ui.help = h("div", { class: "mv-help" }, HELP);
    root.replaceChildren(...bars, columns, h("div", { class: "mv-status" }, ui.where, ui.value, ui.note), ui.help);
    size();
    if (where >= 0) [...root.querySelectorAll("*")][where]?.focus?.({ preventScroll: true });
  }

  function size() {  // all planes at one scale, in their proportions in mm
    if (!width) return;
    const s = mm(), n = shape(), shown = panelsShown(), wide = shown.map(p => n[p.right] * s[p.right]), high = shown.map(p => n[p.up] * s[p.up]), gap = 6, count = scene.volumes.length, sum = a => a.reduce((x, y) => x + y, 0), top = Math.max;
    const room = width - 6, high0 = parseFloat(getComputedStyle(root).getPropertyValue("--medlab-viewer-height")) || scene.height, tall = count > 1 && shown.length > 1 ? 1.7 * high0 : high0;  // a lab says how high
    const rows = Math.min((room - gap * (shown.length - 1)) / sum(wide), tall / count / top(...high)), columns = Math.min((room - gap * (count - 1)) / count / top(...wide), tall / sum(high));
    const stacked = count === 1 || rows > columns, ratio = window.devicePixelRatio || 1;  // a row for each volume, or a column
    ui.scale = top(rows, columns); if (count === 1) ui.scale = rows;
    ui.columns.classList.toggle("mv-stacked", stacked);
    ui.planesBoxes.forEach(e => e.classList.toggle("mv-stacked", !stacked));
    ui.panels.forEach(({ canvas, p }) => {
      const i = shown.findIndex(q => q.name === p.name), w = top(40, Math.floor((stacked ? wide[i] : top(...wide)) * ui.scale)), b = top(40, Math.floor((stacked ? top(...high) : high[i]) * ui.scale));
      canvas.style.width = `${w}px`; canvas.style.height = `${b}px`;
      canvas.width = Math.round(w * ratio); canvas.height = Math.round(b * ratio);
    });
    ui.titles.forEach(t => { t.style.width = stacked ? "" : `${Math.floor(top(...wide) * ui.scale)}px`; });
    kick();
  }

  // ---- mouse and keys ----
  function whole() { const n = scene.shape; model.set("centre", n.map(v => (v - 1) / 2)); set("zoom", 1); }
  function zoomBy(factor, fixed) {  // the voxel `fixed` stays where it is on the screen
    const old = get("zoom"), zoom = clamp(old * factor, 1, 64), from = old > 1 ? get("centre") : scene.shape.map(v => (v - 1) / 2);
    model.set("centre", from.map((c, i) => clamp(fixed[i] * scene.step[i] + (c - fixed[i] * scene.step[i]) * old / zoom, 0, scene.shape[i] - 1)));
    set("zoom", zoom);
  }
  function step(p, by) { const c = at(); c[p.cut] += by; moveTo(c); if (hover) { hover = [...hover]; hover[p.cut] = at()[p.cut]; } }
  const along = (p, axis) => (axis === p.right ? (turned(p) ? -1 : 1) : p.flip_up ? -1 : 1);  // towards the right, upwards

  function listen(canvas, p, k) {
    let drag = null, turn = 0;
    canvas.addEventListener("pointerdown", e => {
      e.preventDefault(); canvas.focus({ preventScroll: true }); canvas.setPointerCapture(e.pointerId);
      active = k;
      const mode = e.button === 2 ? "window" : e.button === 1 || e.shiftKey ? "pan" : tool;
      drag = { mode, x: e.clientX, y: e.clientY, window: [...windowOf(k)], centre: get("zoom") > 1 ? [...get("centre")] : scene.shape.map(v => (v - 1) / 2) };
      if (mode === "cursor") moveTo(voxelAt(canvas, p, e).voxel);
      kick();
    });
    canvas.addEventListener("pointermove", e => {
      const { voxel, inside } = voxelAt(canvas, p, e);
      hover = inside && (!drag || drag.mode !== "cursor") ? voxel : null;
      if (drag) {
        const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
        if (drag.mode === "cursor") moveTo(voxel);
        else if (drag.mode === "window") {
          const [lo, hi] = drag.window, level = (lo + hi) / 2 - dy * (hi - lo) / 300, half = (hi - lo) / 2 * Math.exp(dx / 200);
          setWindow(k, level - half, level + half);
        } else if (get("zoom") > 1) {
          const l = layout(canvas, p), c = [...drag.centre], scale = l.scale / l.ratio;
          c[p.right] -= along(p, p.right) * dx / scale / scene.spacing[p.right]; c[p.up] += along(p, p.up) * dy / scale / scene.spacing[p.up];
          set("centre", c.map((v, i) => clamp(v, 0, scene.shape[i] - 1)));
        }
      }
      again();
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(end, () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { hover = null; again(); });
    canvas.addEventListener("contextmenu", e => { e.preventDefault(); e.stopPropagation(); });
    canvas.addEventListener("dblclick", whole);
    canvas.addEventListener("wheel", e => {
      if (!e.ctrlKey && shape()[p.cut] === 1) return;  // nothing to step through
      if (!e.ctrlKey && performance.now() - lastWheel < 300) { lastWheel = performance.now(); return; }  // the page is being scrolled, and we passed under the pointer
      e.preventDefault(); e.stopPropagation();
      if (e.ctrlKey) return zoomBy(Math.exp(-e.deltaY / 300), voxelAt(canvas, p, e).voxel);
      turn += e.deltaMode === 1 ? e.deltaY * 34 : e.deltaY;
      if (Math.abs(turn) >= 50) { step(p, turn > 0 ? -1 : 1); turn = 0; }
    }, { passive: false });
    canvas.addEventListener("keydown", e => {
      const c = at(), arrows = { ArrowLeft: [p.right, -1], ArrowRight: [p.right, 1], ArrowUp: [p.up, 1], ArrowDown: [p.up, -1] }, many = e.shiftKey ? 10 : 1;
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      if (arrows[e.key]) { const [axis, way] = arrows[e.key]; c[axis] += along(p, axis) * way * many; moveTo(c); }
      else if (e.key === "PageUp" || e.key === "PageDown") step(p, e.key === "PageUp" ? many : -many);
      else if (e.key === "+" || e.key === "=") zoomBy(1.25, c);
      else if (e.key === "-") zoomBy(0.8, c);
      else if (e.key === "0") whole();
      else if (e.key === "x") set("crosshair", !get("crosshair"));
      else if (e.key === "o") ui.overlays.forEach(o => o.box.click());
      else return;
      e.preventDefault(); e.stopPropagation();
    });
  }

  // ---- life ----
  const changed = () => { scene = get("_scene"); if (structure() !== built) build(); kick(); };
  const foreign = e => { if (!root.contains(e.target)) lastWheel = performance.now(); };
  model.on("change:_scene", changed); model.on("change:planes", changed);
  for (const k of STATE) model.on(`change:${k}`, k === "cursor" ? again : kick);
  listeners.add(arrived);
  window.addEventListener("wheel", foreign, { capture: true, passive: true });
  const watch = new ResizeObserver(entries => { const w = Math.floor(entries[0].contentRect.width); if (w && w !== width) { width = w; size(); } });
  build();
  watch.observe(root);
  return () => {
    model.off("change:_scene", changed); model.off("change:planes", changed);
    for (const k of STATE) model.off(`change:${k}`, k === "cursor" ? again : kick);
    listeners.delete(arrived); window.removeEventListener("wheel", foreign, { capture: true }); watch.disconnect(); cancelAnimationFrame(request); clearTimeout(saving);
  };
}

// The pieces of an array, which come in their order: null until the last; nothing where one was lost.
function joiner() {
  const parts = new Map();
  return ({ id, at, bytes }, view) => {
    if (at === 0) parts.set(id, { whole: new Uint8Array(bytes), filled: 0 });
    const part = parts.get(id);
    if (!part || part.filled !== at || part.whole.length !== bytes) { parts.delete(id); return null; }
    part.whole.set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength), at);
    part.filled += view.byteLength;
    if (part.filled < bytes) return null;
    parts.delete(id);
    return part.whole;
  };
}

// Messages may be lost or wait: a page asks until it hears a hello, and then, where it is quiet, for every array that has not come.
function greet(model, arrays) {
  const page = Math.random().toString(36).slice(2), quiet = 6000;
  let timer = 0, wait = 500, known = false;
  const again = () => { clearTimeout(timer); timer = setTimeout(ask, wait); };
  function ask() {
    const { volumes, overlays } = model.get("_scene"), want = [...volumes.flatMap(v => v.ids), ...overlays.map(o => o.id)].filter(id => !arrays.get(id)?.codes);
    if (known && !want.length) { wait = quiet; return; }
    try { model.send({ type: "ready", page, want: known ? want : null }); } catch { return; }  // the kernel is gone, and this model with it
    wait = Math.min(2 * wait, 600000);  // a slow connection is not asked again and again
    again();
  }
  return {
    ask,
    heard(message) { if (!known && message.type === "hello" && message.page === page) { known = true; wait = quiet; } again(); },
    stop() { clearTimeout(timer); },
  };
}

export default () => {
  const arrays = new Map(), listeners = new Set();  // one copy of the data for all views of a page
  return {
    initialize({ model }) {
      const greeting = greet(model, arrays), join = joiner();
      model.on("msg:custom", (message, buffers) => {
        greeting.heard(message);
        const { id, low, step, special, serial } = message, scale = { low, step, special };
        if (message.type === "array") {
          const whole = join(message, buffers[0]);
          if (!whole) return;
          arrays.set(id, { ...scale, codes: unpack(message, whole), planes: [] });
        }
        else if (message.type === "planes") {
          const early = message.planes.map(([axis, at], i) => ({ ...scale, axis, at, codes: unpack({ kind: message.kind, size: buffers[i].byteLength / Number(message.kind[1]) }, buffers[i]) }));
          arrays.set(id, { ...scale, codes: null, ...arrays.get(id), planes: early });
        } else return;
        for (const listener of listeners) listener(serial);
        if (!listeners.size && serial) model.send({ type: "drawn", serial });
      });
      model.on("change:_scene", () => {
        const scene = model.get("_scene"), known = new Set([...scene.volumes.flatMap(v => v.ids), ...scene.overlays.map(o => o.id)]);
        for (const id of arrays.keys()) if (!known.has(id)) arrays.delete(id);
        greeting.heard({});  // there may be another array to wait for
      });
      greeting.ask();
      return greeting.stop;
    },
    render: ({ model, el }) => view({ model, el, arrays, listeners }),
  };
};
