// Proofs of the fixes of a panel: a button that proves, a form that says what it costs, a badge that says what came of it. It stands before panel.js, in one
// module with it, and uses its `make` and `say`. All that is shown comes from the kernel, which reads it from the run directory.
//
// From the kernel:  proofs {rows: {fix: {badge: {proof, label, tone, note, title, old, keep, stop, go_on} | null, busy, why}}}, and answers to these:
// To the kernel:    cost {name, steps, seeds}, prove {name, steps, seeds, scores, pause}, proof {name, what: stop | keep | go on | forget}

const PROOF_CSS = `
.mp-act { border: 1px solid var(--mp-edge); border-radius: 3px; background: var(--mp-bg); white-space: nowrap } .mp-act:hover { background: var(--mp-soft) }
.mp-act.mp-main { border-color: var(--mp-brand); background: var(--mp-brand); color: var(--mp-on) !important; font-weight: 600 }
@container (max-width: 440px) {  /* a name that stands beside a button and the fate of a change is broken, and not cut */
  .mp-row[data-fix] > .mp-line { height: auto; min-height: 27px } .mp-row[data-fix] .mp-label { height: auto; min-height: 22px }
  .mp-row[data-fix] .mp-label .mp-cut { white-space: normal; overflow-wrap: anywhere; line-height: 1.1 } .mp-row[data-fix] .mp-fate { flex: 1 0 auto }
}
.mp-line > .mp-prove { flex: none; height: 20px; padding: 0 5px; font-size: 11px; border-color: var(--mp-line) } .mp-line > .mp-prove:hover, .mp-line > .mp-prove:focus-visible { border-color: var(--mp-edge) }
.mp-proof { display: flex; flex-wrap: wrap; align-items: center; gap: 3px 6px; padding: 0 0 5px; font-size: 11px; line-height: 16px; font-variant-numeric: tabular-nums }
.mp-badge { flex: none; margin-right: auto; padding: 0 6px; border: 1px solid currentColor; border-radius: 8px; font-weight: 600; white-space: nowrap; cursor: help }
.mp-plain { color: var(--mp-fg) }
.mp-proof > .mp-rests { order: 1; flex: 1 1 100%; min-width: 0; color: var(--mp-muted); overflow-wrap: anywhere }
.mp-proof[data-old=true] > .mp-badge { color: var(--mp-muted); border-style: dashed; font-weight: 500 }
.mp-proof > .mp-act { flex: none; height: 20px; padding: 0 8px; font-size: 11px }
.mp-form { margin: 0 0 7px; padding: 7px 8px; border: 1px solid var(--mp-line); border-radius: 3px; display: flex; flex-wrap: wrap; align-items: center; gap: 6px 12px }
.mp-form label { display: flex; align-items: center; gap: 5px; white-space: nowrap } .medlab-panel .mp-form input[type=text] { width: 52px }
.mp-cost { flex: 1 1 100%; color: var(--mp-muted); font-size: 11px; min-height: 2.9em } .mp-cost.mp-bad { color: var(--mp-bad) }
.mp-form > .mp-act { padding: 0 10px; height: 24px }
.mp-refusal { display: flex; align-items: flex-start; gap: 6px } .mp-refusal > span { flex: 1 } .medlab-panel .mp-refusal button { flex: none; width: 18px; height: 18px; margin: 0; padding: 0; border: 0; background: none }`;

function proving(ask, later) {  // what a row of a fix has of proofs; ask(kind, fields) → name of the request
  const typed = { steps: "200", seeds: "8", scores: true, pause: false }, waiting = new Map();  // request → what to do with its answer
  const number = text => /^\d{1,9}$/.test(text.trim()) ? Number(text) : null;

  function attach(r, fix) {
    const p = r.proof = { form: null, box: make("div", "mp-proof"), badge: make("span", "mp-badge"), note: make("span", "mp-rests"), why: make("div", "mp-why mp-bad mp-refusal"), whyText: make("span"), buttons: {} };
    p.button = make("button", "mp-act mp-prove", "prove", { type: "button", "aria-expanded": false, "aria-label": `Prove ${fix}`, title: "Prove it: from the state of now, arms with this fix and without, which say whether it does anything. Training goes on." });
    p.button.onclick = () => toggle(r, fix);
    r.control.before(p.button);
    p.box.append(p.badge, p.note);
    for (const [what, text, title] of [["keep", "keep", "Switch the fix on in the run; its log will name this proof"], ["stop", "stop", "Stop the proof; the arms that are made stay"], ["go on", "go on", "Make the arms that are left"]]) {
      const b = p.buttons[what] = make("button", "mp-act", text, { type: "button", title, "aria-label": `${text} the proof of ${fix}` });
      b.onclick = () => { b.disabled = true; later(() => { b.disabled = false }, 2000); ask("proof", { name: fix, what }) };
      p.box.append(b);
    }
    const away = make("button", "", "×", { type: "button", title: "Dismiss", "aria-label": `Dismiss what was said of the proof of ${fix}` });
    away.onclick = () => ask("proof", { name: fix, what: "forget" });
    p.why.append(p.whyText, away);
    r.line.after(p.box, p.why);
    p.box.hidden = p.why.hidden = true;
  }

  function toggle(r, fix, open = !r.proof.form) {
    const p = r.proof;
    p.button.setAttribute("aria-expanded", open);
    if (!open) { p.form?.remove(); p.form = null; p.why.hidden = !p.row?.why; return }
    p.why.hidden = true;
    const form = p.form = make("div", "mp-form", undefined, { role: "group", "aria-label": `Proof of ${fix}` }), cost = make("div", "mp-cost", "", { role: "status" }), start = make("button", "mp-act mp-main", "Start the proof", { type: "button" }), never = make("button", "mp-act", "Cancel", { type: "button" });
    const field = (name, text, title) => { const l = make("label", "", text, { title }), i = make("input", "", undefined, { type: "text", inputmode: "numeric", name, "aria-label": `${text}: ${title}` }); i.value = typed[name]; i.oninput = () => { typed[name] = i.value; clearTimeout(p.timer); p.timer = later(price, 300) }; l.append(i); return l };
    const box = (name, text, title) => { const l = make("label", "", undefined, { title }), i = make("input", "", undefined, { type: "checkbox", name }); i.checked = typed[name]; i.onchange = () => { typed[name] = i.checked }; l.append(i, document.createTextNode(text)); return l };
    const fields = () => ({ name: fix, steps: number(typed.steps), seeds: number(typed.seeds) });
    const tell = (text, bad) => { cost.classList.toggle("mp-bad", bad); say(cost, text, text) };
    function price() { if (p.form === form) waiting.set(ask("cost", fields()), m => { if (p.form === form) tell(m.text, !m.ok) }) }
    form.append(field("steps", "steps", "of each arm"), field("seeds", "seeds", "pairs of arms at most, 3 to 24"), box("scores", "scores", "measure the recipe's own scores of each arm, too, which may take long"), box("pause", "pause training", "let the run wait meanwhile"), cost, start, never);
    start.onclick = () => { tell("asking", false); waiting.set(ask("prove", { ...fields(), scores: typed.scores, pause: typed.pause }), m => { if (m.ok) toggle(r, fix, false); else if (p.form === form) tell(m.text, true) }) };
    never.onclick = () => { toggle(r, fix, false); p.button.focus() };
    form.onkeydown = e => { if (e.key === "Escape") never.onclick(); else if (e.key === "Enter" && e.target.type === "text") start.onclick() };
    r.line.after(form);
    price(); form.querySelector("input").focus();
  }

  function draw(r, fix, row) {  // row: what the kernel says, undefined where there is nothing
    const p = r.proof, b = (p.row = row)?.badge, busy = row?.busy, state = busy ? "begins" : b?.label ?? "";
    p.button.hidden = r.box.dataset.state === "on" || r.box.dataset.pending === "true" || !!busy || !!b?.stop;
    if (p.button.hidden && p.form) toggle(r, fix, false);
    p.box.hidden = !b && !busy; r.box.dataset.proof = state;
    if (!p.box.hidden) {
      p.badge.className = `mp-badge mp-${busy ? "brand" : b.tone}`; p.box.dataset.old = !busy && !!b.old;
      say(p.badge, busy ? "begins" : b.label, busy ? busy : b.title); say(p.note, busy ? busy : b.note, busy ? busy : b.title);
      p.buttons.keep.hidden = busy || !b.keep; p.buttons.stop.hidden = busy || !b.stop; p.buttons["go on"].hidden = busy || !b.go_on;
    }
    p.why.hidden = !row?.why || !!p.form; say(p.whyText, row?.why ?? "");
  }

  return { attach, draw, answer(m) { const told = waiting.get(m.request); waiting.delete(m.request); told?.(m) } };
}

