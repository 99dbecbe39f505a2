// The live page: reads the state of a run, follows its events, fills cards, map and log, and gives new timelines to the
// scripts that draw them. Text goes through textContent; of the map, which can come from another host's page, only shapes and
// text are taken.

const COLUMNS = ["step", "loss", "tokens_per_s", "iteration_s", "utilization", "mfu"], MAX_POINTS = 1000;
const REFRESH_MS = 2000, MAX_REFRESH_MS = 10000, DRAW_SHARE = 0.01;  // least and most time between two timelines, and the share of a core that drawing may take: training may need it
const drawn = { map: "", links: "", events: "" };  // what is on the page already
const isNew = (part, data) => { const text = JSON.stringify(data); if (drawn[part] === text) return false; drawn[part] = text; return true; };
const live = { state: null, series: null, shown: -1, held: false, asking: false, opened: false, busy: false, heard: 0, lost: false };

const short = x => Number.isInteger(x) && Math.abs(x) < 1e4 ? String(x) : x >= 1e9 ? (x / 1e9).toFixed(2) + " G" : x >= 1e6 ? (x / 1e6).toFixed(2) + " M" : x >= 1e4 ? (x / 1e3).toFixed(1) + " k" : x >= 100 ? x.toFixed(0) : x.toPrecision(3);
const known = x => x !== null && x !== undefined && Number.isFinite(x);
const clock = t => new Date(1000 * t).toLocaleTimeString([], { hour12: false });

async function api(path, body) {
  const how = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body.data), signal: body.signal };
  const reply = await fetch(path, how), data = await reply.json();
  if (!reply.ok) throw new Error(data.error || reply.statusText);
  return data;
}

// ---- cards ---------------------------------------------------------------------------------------------------------

function spark(values) {
  const found = values.filter(known);
  if (found.length < 2) return null;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS(svg.namespaceURI, "path");
  const low = Math.min(...found), high = Math.max(...found), span = high - low || 1;
  const points = values.map((v, i) => known(v) ? `${(100 * i / (values.length - 1)).toFixed(2)} ${(20 - 18 * (v - low) / span).toFixed(2)}` : null);
  path.setAttribute("d", "M" + points.filter(p => p).join("L"));
  svg.setAttribute("viewBox", "0 0 100 22"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  svg.append(path);
  return svg;
}

function card(id, name, value, text, note, extra, title) {
  let box = $("card-" + id);
  if (!box) { box = make("div", "card", null, $("cards")); box.id = "card-" + id; }
  box.replaceChildren();
  make("h2", "", name, box);
  const figure = make("b", "", known(value) ? text : "–", box);
  if (known(value)) figure.dataset.value = value;
  make("small", "", note || "\u00a0", box);
  if (extra) box.append(extra);
  box.title = title || "";
}

function busyBar(state) {
  if (!state.bubbles) return null;
  const shareOf = c => state.bubbles[CAUSE[c]] || 0;
  return fillSplit(make("div", "split"), 1 - CAUSE_ORDER.reduce((sum, c) => sum + shareOf(c), 0), shareOf);
}

function fillCards(state) {
  const last = state.last || {}, plan = state.predicted, run = state.run, s = live.series || {};
  const saved = isSaved(state), time = known(last.iteration_s) ? last.iteration_s : plan ? plan.iteration_s : known(run.iteration_s) ? run.iteration_s : null;
  const off = known(last.iteration_s) && plan ? last.iteration_s / plan.iteration_s - 1 : null;
  card("iteration", last.step ? "iteration, measured" : saved ? `iteration, ${run.source}` : "iteration, predicted", time, known(time) ? duration(time * 1e9) : "",
    off === null ? plan && plan.order === "first" && run.source === "simulated" ? "order not searched yet…" : idle(state) ? "one optimizer step" : "" : `predicted ${duration(plan.iteration_s * 1e9)}, ${off >= 0 ? "+" : ""}${(100 * off).toFixed(1)} %`, spark(s.iteration_s || []), "Time of one optimizer step");
  const speed = known(last.tokens_per_s) ? last.tokens_per_s : plan && !last.step ? plan.tokens_per_s : null;
  // Paced devices train a small model in the job's time: the job's own tokens a second follow from its plan.
  const whole = run.device === "paced" && last.step && plan && last.iteration_s ? plan.tokens_per_s * plan.iteration_s / last.iteration_s : null;
  const isSmall = known(whole) && Math.abs(speed / whole - 1) > 0.01;
  card("tokens", "tokens a second", speed, known(speed) ? short(speed) : "", isSmall ? `the job: ${short(whole)}` : known(last.tokens_per_gpu_s) ? short(last.tokens_per_gpu_s) + " for each GPU" : idle(state) && plan ? `on ${plan.num_gpus.toLocaleString("en")} GPUs` : "", spark(s.tokens_per_s || []),
    isSmall ? "Of the small model that runs on paced devices. At this iteration time the job itself trains on " + Math.round(whole).toLocaleString("en") + " tokens a second." : "Tokens trained on in a second");
  if (!idle(state)) card("loss", "loss", last.loss, known(last.loss) ? last.loss.toFixed(4) : "", "", spark(s.loss || []));
  const busy = known(run.utilization) ? run.utilization : plan ? plan.utilization : null;
  card("busy", "accelerators busy", busy, known(busy) ? percent(busy) : "", plan && !idle(state) ? `predicted ${percent(plan.utilization)}` : "of the time", busyBar(state), "Share of the time in which accelerators compute; the bar shows what they wait for");
  const mfu = known(last.mfu) ? last.mfu : plan && !last.step ? plan.mfu : null;
  card("mfu", "MFU", mfu, known(mfu) ? percent(mfu) : "", plan && !idle(state) ? `predicted ${percent(plan.mfu)}` : "model FLOPs utilization", spark(s.mfu || []), "Model FLOPs utilization: useful FLOPs divided by what the GPUs could do");
  const links = state.links || [], busiest = links.reduce((a, b) => !a || b.load > a.load ? b : a, null);
  if (busiest) card("wan", "busiest WAN link", busiest.load, percent(busiest.load), `${busiest.gbit_s.toPrecision(3)} Gbit/s, ${busiest.a} – ${busiest.b}`, null,
    known(busiest.transfer_ms) ? `A transfer takes ${busiest.transfer_ms.toFixed(1)} ms (median)` : "");
  for (const [k, one] of (state.service || []).entries()) {
    const unit = String(one.unit || ""), sign = unit.length === 1 ? " " + unit : "";
    card("service" + k, one.label, one.value, known(one.value) ? short(one.value) + sign : "", unit && !sign ? `${unit}, BubbleTea` : "BubbleTea");
  }
}

// ---- state ----------------------------------------------------------------------------------------------------------

const idle = state => state.run.status === "waiting" && state.run.source === "simulated";
const isSaved = state => !state.predicted && !state.last && known(state.run.iteration_s);  // a timeline file without its job
const unstarted = state => isSaved(state) ? "a saved timeline" : "not running: " + (!state.predicted ? "no prediction" : state.predicted.order === "searched" ? "predicted, the figures of atlas simulate" : "first prediction; a search for a better order goes on…");

function fillStatus() {
  const state = live.state, run = state.run, last = state.last, box = $("status");
  const age = last && known(last.time) ? Date.now() / 1000 - last.time : null, late = age !== null && age > Math.max(10, 3 * last.iteration_s);
  const of = run.steps ? ` of ${run.steps.toLocaleString("en")}` : "", step = last ? `step ${last.step}${of}` : "";
  const words = live.lost ? "connection to the page's server lost" : run.status === "ended" ? "ended" + (run.reason ? `: ${run.reason}` : "")
    : run.status === "running" ? late ? `no step for ${age.toFixed(0)} s` : "running" : run.source === "simulated" || isSaved(state) ? unstarted(state) : "waiting for the first step";
  box.className = live.lost ? "lost" : run.status === "running" ? late ? "late" : "running" : "";
  box.replaceChildren(make("i"), [words, step, run.slower > 1 ? `slowed ${run.slower}x` : "", run.checkpoints && run.checkpoints.length ? `checkpoint of step ${run.checkpoints[run.checkpoints.length - 1]}` : ""].filter(t => t).join(" · "));
}

function fillEvents(events) {
  const list = $("events"), atEnd = list.dataset.count !== String(events.length);
  list.replaceChildren();
  for (const event of events.slice().reverse()) {
    const item = make("li", event.kind, null, list);
    make("time", "", clock(event.time), item); make("span", "", event.text, item);
  }
  if (!events.length) make("li", "", isSaved(live.state) ? "A timeline file has no events. Name the folder of a run, or a plan, to see more."
    : idle(live.state) ? "This job is not running: the page shows its prediction. Press “what if” to change links, GPUs or schedule. Train with --ui to see the run here."
    : "No events yet: connections lost, hosts lost, restarts and new plans are listed here.", list);
  list.dataset.count = events.length;
  if (atEnd) list.scrollTop = 0;
}

function fillMap(text) {
  const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  for (const part of [drawn, ...drawn.querySelectorAll("*")]) {
    if (!["svg", "g", "path", "circle", "text", "tspan", "title"].includes(part.localName)) part.remove();
    for (const { name } of [...part.attributes]) if (/^on|href/i.test(name)) part.removeAttribute(name);
  }
  const coast = drawn.querySelector(".coast");
  if (coast) coast.setAttribute("d", live.coast || "");
  $("picture").replaceChildren(document.importNode(drawn, true));
}

function fillLinks(links) {
  const list = $("links");
  list.replaceChildren();
  for (const link of links.filter(one => one.pipeline)) {
    const item = make("li", "", null, list);
    make("i", "chip", null, item).style.backgroundColor = link.color;
    make("b", "", `${link.a} – ${link.b}`, item);
    item.append(` ${link.gbit_s.toPrecision(3)} of ${short(link.gbps)} Gbit/s, ${percent(link.load)} load, ${short(link.latency_ms)} ms one way` + (known(link.transfer_ms) ? `, a transfer takes ${link.transfer_ms.toFixed(0)} ms` : ""));
  }
}

function apply(state) {
  live.state = state; live.heard = Date.now(); live.lost = false;
  const before = live.series && live.series.step[live.series.step.length - 1];
  if (state.series) live.series = state.series;
  else if (state.last && before >= state.last.step + 1) api("/api/state").then(apply);  // a restart: steps are done again
  else if (live.series && state.last && state.last.step !== live.series.step[live.series.step.length - 1])
    for (const key of COLUMNS) { const row = live.series[key]; row.push(state.last[key] ?? null); if (row.length > MAX_POINTS) row.shift(); }
  document.title = `${state.run.name} – Atlas`;
  $("name").textContent = state.run.name;
  $("kind").textContent = state.run.source || "waiting"; $("kind").className = "badge " + state.run.source;
  $("ask").hidden = !state.whatif;
  if (!live.asking) $("said").textContent = state.verdict;
  fillStatus(); fillCards(state);
  if (isNew("events", [state.events, idle(state)])) fillEvents(state.events);
  if (state.coast !== undefined) live.coast = state.coast;
  if (state.map && isNew("map", [state.map, live.coast])) fillMap(state.map);
  else if (!$("picture").childElementCount) make("p", "", "There is no job file beside this run: no map and no prediction.", $("picture"));
  if (isNew("links", state.links)) fillLinks(state.links || []);
  document.documentElement.dataset.state = state.version;
  if (state.timeline_version !== live.shown) refresh();
}

// ---- timelines ------------------------------------------------------------------------------------------------------

const looking = () => live.held || live.asking || inspected.pin || inspected.range || drag || document.hidden;

async function refresh() {
  if (live.busy || live.opened && looking()) return;
  live.busy = true;
  let took = 0;
  try {
    const found = await api("/api/timeline"), began = performance.now();
    if (!live.asking || !live.opened) await draw(found.header, found.spans);
    live.shown = found.version;
    await new Promise(requestAnimationFrame);
    took = performance.now() - began;
  } finally {
    const rest = Math.min(MAX_REFRESH_MS, Math.max(REFRESH_MS, took / DRAW_SHARE));
    setTimeout(() => { live.busy = false; if (live.state.timeline_version !== live.shown) refresh(); }, rest);
  }
}

async function draw(header, texts) {
  if (!header) { document.documentElement.dataset.ready = "yes"; return; }
  $("empty").hidden = true;
  const before = view.schedules.length;
  if (live.opened) await replaceRun(header, texts);
  else { live.opened = true; HEAD = header; await openRun(texts); }
  if (before !== view.schedules.length) {
    // Both timelines should be seen at once: strips instead of rows where there are too many workers. Both begin at 0, so the
    // first of the iterations is the one to compare.
    if (view.total > 1.5 * (size(plot).h - RULER)) foldAll(true);
    const ends = view.schedules.map(one => one.steps[0] || one.makespan);
    show(-0.01 * Math.max(...ends), 1.02 * Math.max(...ends));
  }
  $("about").textContent = live.asking ? "what if, above the current figures" : header.schedules.length > 1 ? "predicted, above measured" : header.schedules[0].source;
  if (live.state) fillCards(live.state);
}

// ---- events ---------------------------------------------------------------------------------------------------------

function follow() {
  const source = new EventSource("/events");
  let again = false;
  source.onopen = async () => { if (again) apply(await api("/api/state")); again = true; };
  source.onmessage = message => apply(JSON.parse(message.data));
  source.onerror = () => { live.lost = true; if (live.state) fillStatus(); };
}

async function begin() {
  HEIGHT.schedule = 22; HEIGHT.group = 15; thinnest = 6;  // two timelines in half a screen
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  apply(await api("/api/state"));
  follow();
  setInterval(() => { fillStatus(); if (live.state.timeline_version !== live.shown) refresh(); }, 1000);
  $("hold").addEventListener("click", () => { live.held = !live.held; $("hold").setAttribute("aria-pressed", live.held); if (!live.held) refresh(); });
  KEYS.p = () => $("hold").click();
  KEYS.x = () => { if (!$("ask").hidden) $("ask").click(); };
  listenWhatIf();
}

window.atlasLive = live;
