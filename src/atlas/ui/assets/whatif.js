// What if, by hand: sliders, the answer at once from a known order, then the searched one. Its timeline is drawn above that of
// now, in place of the run's.

const desk = { base: null, facts: null, values: {}, timer: 0, later: 0, abort: null, asked: 0, answer: null };
const FACTOR = { min: -4, max: 4, step: 0.25 };

function sliderRows() {
  const { base, gbps, latency_ms: ms, gpus_per_pipeline: each } = desk.facts, span = ([a, b], f) => a === b ? `${short(a * f)}` : `${short(a * f)}–${short(b * f)}`;
  const v = desk.values, count = name => ({ min: 1, max: Math.max(8, 3 * base[name]), step: 1 });
  const times = f => f === 1 ? "" : `×${Number(f.toPrecision(3))} · `;
  return [
    ["bandwidth", "bandwidth", FACTOR, () => `${times(v.bandwidth)}${span(gbps, v.bandwidth)} Gbit/s a node pair`],
    ["latency", "latency", FACTOR, () => `${times(v.latency)}${span(ms, v.latency)} ms one way`],
    ["pipelines", "GPUs", count("pipelines"), () => `${(each * v.pipelines * v.cells).toLocaleString("en")}: ${v.pipelines} pipeline${v.pipelines > 1 ? "s" : ""} a cell`],
    ["cells", "cells", count("cells"), () => `${v.cells}`],
    ["microbatches", "microbatches", count("microbatches"), () => `${v.microbatches} a pipeline`],
  ];
}

const isFactor = key => key === "bandwidth" || key === "latency";
const toSlider = (key, value) => isFactor(key) ? Math.log2(value) : value;
const fromSlider = (key, value) => isFactor(key) ? 2 ** value : value;

function drawSliders() {
  const panel = $("whatif");
  panel.replaceChildren();
  const grid = make("div", "", null, panel);
  grid.id = "sliders";
  for (const [key, name, range, words] of sliderRows()) {
    make("label", "", name, grid).htmlFor = "slider-" + key;
    const input = make("input", "", null, grid), output = make("output", "", words(), grid);
    input.type = "range"; input.id = "slider-" + key; Object.assign(input, range); input.value = toSlider(key, desk.values[key]);
    input.setAttribute("aria-valuetext", words());
    input.addEventListener("input", () => {
      desk.values[key] = fromSlider(key, Number(input.value));
      for (const [other, , , say] of sliderRows()) { $("slider-" + other).nextSibling.textContent = say(); $("slider-" + other).setAttribute("aria-valuetext", say()); }
      ask();
    });
  }
  make("label", "", "schedule", grid).htmlFor = "slider-schedule";
  const select = make("select", "", null, grid);
  select.id = "slider-schedule";
  for (const [name, summary] of Object.entries(desk.facts.schedules)) { const option = make("option", "", name, select); option.value = name; option.title = summary; }
  select.value = desk.values.schedule;
  select.addEventListener("change", () => { desk.values.schedule = select.value; ask(); });
  const reset = make("button", "", "reset", grid);
  reset.addEventListener("click", () => { desk.values = { ...desk.base }; drawSliders(); ask(); });
  const answer = make("div", "", null, panel);
  answer.id = "answer"; answer.setAttribute("aria-live", "polite");
  const bar = make("div", "bar", null, panel), copy = make("button", "", "copy as command", bar), save = make("button", "", "save as job file", bar);
  copy.id = "copy"; save.id = "save";
  copy.addEventListener("click", copyCommand); save.addEventListener("click", saveJob);
  make("span", "hint", "", bar).id = "done";
}

/** At once from a known order, then the search. An older question is dropped. */
function ask() {
  clearTimeout(desk.timer); clearTimeout(desk.later);
  const number = ++desk.asked;
  if (desk.abort) desk.abort.abort();
  desk.abort = new AbortController();
  const request = { data: { ...desk.values }, signal: desk.abort.signal };
  const post = async path => {
    try {
      const found = await api("/api/whatif/" + path, request);
      if (number === desk.asked && !found.superseded) await showAnswer(found);
    } catch (error) {
      if (error.name !== "AbortError" && number === desk.asked) showRefusal(error.message);
    }
  };
  desk.timer = setTimeout(async () => { await post("quick"); }, 20);
  desk.later = setTimeout(() => { if (number === desk.asked) { const label = $("answer").querySelector(".label"); if (label) label.textContent += " · searching…"; post("search"); } }, 700);
}

function showRefusal(text) {
  $("answer").replaceChildren(make("p", "bad", text));
  desk.answer = null;
}

async function showAnswer(found) {
  desk.answer = found;
  const box = $("answer"), row = found.row, off = found.now_s / row.iteration_s;
  const change = Math.abs(off - 1) < 0.005 ? "" : off > 1 ? `: ${off.toFixed(2)}× faster` : `: ${(1 / off).toFixed(2)}× slower`;
  box.replaceChildren();
  const head = make("p", "", null, box);
  make("span", "badge " + (found.kind === "searched" ? "searched" : ""), { frozen: "re-priced", unsearched: "not searched", searched: "searched" }[found.kind], head);
  head.append(" "); make("span", "label", found.label, head);
  const list = make("dl", "", null, box);
  const pair = (id, name, value, text) => { const one = make("div", "", null, list); make("dt", "", name, one); const dd = make("dd", "", text, one); dd.id = "answer-" + id; dd.dataset.value = value; };
  pair("iteration_s", "iteration", row.iteration_s, `${duration(row.iteration_s * 1e9)} (now ${duration(found.now_s * 1e9)}${change})`);
  pair("tokens_per_s", "tokens/s", row.tokens_per_s, short(row.tokens_per_s));
  pair("num_gpus", "GPUs", row.num_gpus, row.num_gpus.toLocaleString("en"));
  pair("utilization", "busy", row.utilization, percent(row.utilization));
  pair("mfu", "MFU", row.mfu, percent(row.mfu));
  pair("peak_gib", "memory", row.peak_gib, `${row.peak_gib.toFixed(1)} of ${row.memory_gib.toFixed(1)} GiB`);
  if (found.usd_per_hour) pair("usd", "cost", found.usd_per_hour, `$${short(found.usd_per_hour)} an hour, $${found.usd_per_iteration.toPrecision(3)} an iteration`);
  make("p", row.fits ? "" : "bad", found.verdict, box);
  box.dataset.kind = found.kind;
  if (live.asking) { $("said").textContent = found.verdict; await draw(found.header, found.spans); }
}

async function copyCommand() {
  if (!desk.answer) return;
  const done = $("done");
  try { await navigator.clipboard.writeText(desk.answer.command); done.textContent = "copied"; }
  catch { done.textContent = desk.answer.command; }
  done.dataset.command = desk.answer.command;
}

async function saveJob() {
  const found = await api("/api/whatif/job", { data: { ...desk.values } }), link = make("a");
  link.href = URL.createObjectURL(new Blob([found.text], { type: "text/yaml" }));
  link.download = found.name; link.click(); URL.revokeObjectURL(link.href);
  $("done").textContent = "saved " + found.name;
}

async function toggleWhatIf() {
  live.asking = !live.asking;
  $("ask").setAttribute("aria-pressed", live.asking);
  $("whatif").hidden = !live.asking; $("log").hidden = live.asking;
  document.body.classList.toggle("asking", live.asking);
  if (!live.asking) { live.shown = -1; $("said").textContent = live.state.verdict; return refresh(); }
  if (!desk.facts) {
    desk.facts = await api("/api/whatif/sliders", { data: {} });
    desk.base = desk.facts.base; desk.values = { ...desk.base };
    drawSliders();
  }
  ask();
}

function listenWhatIf() { $("ask").addEventListener("click", () => toggleWhatIf().catch(error => { $("whatif").replaceChildren(make("p", "bad", error.message)); })); }

begin().catch(error => { $("said").textContent = "The page could not be drawn: " + error; throw error; });
