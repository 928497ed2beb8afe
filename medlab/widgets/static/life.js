// Whether the kernel still speaks: one answer for all widgets of a kernel on this page, whatever each of them shows. It stands before the code of a widget, in one module with it.
// A kernel gives a sign of life every five seconds ({t: "beat"}, see `Messages.send_beat`).

const QUIET = 16000, LIVES = (globalThis[Symbol.for("medlab.lives")] ??= new WeakMap());  // milliseconds; widget manager → what is known of its kernel

function life(model, changed) {  // `changed` is called when the answer is another
  const key = model.widget_manager ?? globalThis, common = LIVES.get(key) ?? { heard: 0, views: new Set() };
  LIVES.set(key, common);
  const own = { dead: false, silent: false };
  const look = () => { const silent = common.heard > 0 && Date.now() - common.heard > QUIET; if (silent !== own.silent) { own.silent = silent; changed() } };
  const live = () => { const dead = model.comm_live !== true; if (dead !== own.dead) { own.dead = dead; changed() } };
  const timer = setInterval(look, 1000);
  let again;
  common.views.add(look); model.on("comm_live_update", live);
  return {
    get dead() { return own.dead },
    get silent() { return own.silent },
    heard() { common.heard = Date.now(); for (const f of common.views) f(); if (own.dead) { own.dead = false; changed() } },
    word: state => own.dead ? "cut off" : own.silent ? "no word" : state ?? "",
    why: state => own.dead ? "the kernel of this view is gone; a run in a process of its own trains on" : own.silent ? `the kernel has sent nothing for ${Math.round(QUIET / 1000)} s: it may be gone, or this page is cut off. The run was ${state ?? "not known"} then` : { killed: "the process ended without a word", starting: "a process of its own is starting", "out of reach": "the run directory cannot be read now" }[state] ?? "",
    insist(say, answered, wait = 3000) {  // say it until it is answered: words may be lost, or wait for a cell to end
      say();
      again = setTimeout(() => { if (!answered()) this.insist(say, answered, Math.min(2 * wait, 30000)) }, wait);
    },
    stop() { clearInterval(timer); clearTimeout(again); common.views.delete(look); model.off("comm_live_update", live) },
  };
}

