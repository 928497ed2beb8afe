// The arms of a proof beside the curve of their run: of each factor the mean of its arms, with the 95 % interval of the mean as a band. It stands before
// curves.js, in one module with it, and uses its `make` and `number`. The kernel says which proof is on view; a page may choose another, or none.
//
// From the kernel:  arms {proofs: [name], shown: name | "", curves: [{name, arms, step, mean, low, high}]}, null where there is no value
// To the kernel:    arms {proof: name | ""}

function armsOf(send, zoom, all) {  // send(message), zoom(first, last), all(): show all steps
  const label = make("label", "mc-arms", "Arms"), list = make("select"), near = make("button", "mc-plain", "zoom"), S = { shown: "", proofs: [], curves: [], asked: false };
  list.setAttribute("aria-label", "Arms on view: those of this proof");
  near.title = "Show the steps of the arms"; near.onclick = () => { if (S.curves.length) close() };
  label.append(list, near); label.hidden = true; label.title = "Mean of the arms of a proof, with its 95 % interval, over the loss of the run";
  list.onchange = () => { S.asked = true; send({ t: "arms", proof: list.value }); if (!list.value) all() };
  const holds = p => p.group.names.includes("loss"), colour = (c, i) => i ? c.series[[5, 4, 3, 2][(i - 1) % 4]] : c.fg;
  const close = () => { const s = S.curves[0].step, a = s[0], b = s[s.length - 1], w = Math.max(4, b - a); S.asked = false; zoom(Math.max(0, a - w), b + w) };
  const name = c => `${c.name === "off" ? "arms without" : `arms with ${c.name}`} ×${c.arms}`;

  return {
    box: label,
    hear(m) {
      Object.assign(S, { shown: m.shown, proofs: m.proofs, curves: m.curves });
      if (list.dataset.said !== m.proofs.join("\0")) { list.dataset.said = m.proofs.join("\0"); list.replaceChildren(...["", ...m.proofs].map(n => { const o = make("option", "", n || "no proof"); o.value = n; return o })) }
      list.value = m.shown; label.hidden = !m.proofs.length; label.dataset.arms = m.curves.map(c => c.arms).join(" ");
      near.disabled = !m.curves.length;
      if (S.asked && m.curves.length) close();
    },
    alone: (p, x) => holds(p) && S.curves.length > 0 && x[1] - x[0] <= 5 * Math.max(4, S.curves[0].step.at(-1) - S.curves[0].step[0]),  // near them only the loss itself stands beside them: its parts would press them flat
    *values(p, x) {  // of the bands on view
      if (holds(p)) for (const c of S.curves) for (let k = 0; k < c.step.length; k++) if (c.step[k] >= x[0] && c.step[k] <= x[1]) for (const v of [c.low[k], c.mean[k], c.high[k]]) if (v !== null) yield v;
    },
    draw({ g, p, X, Y }, colours) {
      if (!holds(p)) return;
      S.curves.forEach((c, i) => {
        const at = [...c.step.keys()].filter(k => c.mean[k] !== null), path = (ks, v) => ks.forEach(k => g.lineTo(X(c.step[k]), Y(v[k])));
        g.fillStyle = g.strokeStyle = colour(colours, i); g.globalAlpha = i ? 0.22 : 0.16;
        g.beginPath(); path(at, c.high); path(at.slice().reverse(), c.low); g.fill();
        g.globalAlpha = 1; g.lineWidth = 2; g.setLineDash(i ? [] : [5, 3]); g.beginPath(); path(at, c.mean); g.stroke(); g.setLineDash([]); g.lineWidth = 1;
      });
    },
    legend(p, colours) {
      return !holds(p) ? [] : S.curves.map((c, i) => {
        const e = make("span", "mc-arm"), swatch = make("span", "mc-swatch"), last = [...c.mean].reverse().find(v => v !== null);
        swatch.style.borderTopColor = colour(colours, i); swatch.style.borderTopStyle = i ? "solid" : "dashed";
        e.append(swatch, make("span", "mc-name", name(c)), make("span", "mc-value", last === undefined ? "" : number(last)));
        e.title = `${name(c)}: mean at the end, and 95 % interval of the mean as a band`;
        return e;
      });
    },
  };
}

