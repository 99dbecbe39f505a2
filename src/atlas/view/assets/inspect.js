// Looking closer: a pinned span, the statistics of a dragged range, the search for an op, and the view of one step.
// Keeps what is inspected; draws on the transparent canvas and fills the panels at the corner.

const inspected = { pin: null, range: null, matches: [], at: -1 };

// ---- one step ---------------------------------------------------------------------------------------------------

/** Shows the step at a time, by default at the middle of the view, of the first schedule that has several. */
function showStep(t = (view.t0 + view.t1) / 2) {
  const s = view.schedules.find(one => one.steps.length > 1);
  if (!s) return;
  const inside = Math.min(t, s.makespan * 0.999);
  const k = Math.max(0, s.steps.findIndex(end => end > inside)), from = k ? s.steps[k - 1] : 0, air = (s.steps[k] - from) * 0.01;
  show(from - air, s.steps[k] + air);
}

// ---- the pinned span --------------------------------------------------------------------------------------------

function pinSpan(what) {
  const panel = $("pin");
  inspected.pin = what;
  panel.replaceChildren();
  panel.hidden = !what;
  if (what) { tipForSpan(panel, what.s, what.row, what.i); closer(panel, () => pinSpan(null)); }
  drawOver();
}

function drawPin(ctx) {
  const at = inspected.pin;
  if (at) outline(ctx, at.s, at.row, at.s.start[at.i], at.s.end[at.i], Paint.accent, 3);
}

function closer(panel, close) {
  const bar = make("div", "bar", null, panel), button = make("button", "", "close", bar);
  button.title = "Close (Esc)";
  button.addEventListener("click", close);
  return bar;
}

// ---- the selected range -----------------------------------------------------------------------------------------

function selectRange(from, to) {
  const a = Math.max(0, Math.min(from, to)), b = Math.min(view.extent, Math.max(from, to)), panel = $("range");
  inspected.range = b > a ? { a, b, rows: view.schedules.map(s => rangeFigures(s, a, b)) } : null;
  panel.replaceChildren();
  panel.hidden = !inspected.range;
  if (inspected.range) fillRange(panel, inspected.range);
  drawOver();
}

/** Shares of all workers' time in a range, ops that start in it, and how busy WAN links are. */
function rangeFigures(s, a, b) {
  const shares = new Float64Array(NUM_CODES), links = [];
  let workers = 0, ops = 0;
  for (const group of s.groups) {
    const part = measureShares(s, group.first, group.last, a, b, 1), count = group.last - group.first;
    if (group.links) { links.push((part[SEND] + part[SEND + 1])); continue; }
    workers += count;
    for (let c = 0; c < NUM_CODES; c++) shares[c] += part[c] * count;
    for (let row = group.first; row < group.last; row++) {
      if (s.ptr[row] === s.ptr[row + 1]) continue;
      for (let i = spanBefore(s, row, a); i < s.ptr[row + 1] && s.start[i] < b; i++) if (s.start[i] >= a && s.code[i] < WAIT) ops++;
    }
  }
  for (let c = 0; c < NUM_CODES; c++) shares[c] /= workers;
  const busy = [0, 1, 2, 3, 4, 7, 8].reduce((sum, c) => sum + shares[c], 0);
  const waits = CAUSE.map((_, c) => shares[WAIT + c]);
  waits[4] += shares[5] + shares[6];  // collectives are waits for a network too
  for (let c = 5; c < NUM_CAUSES; c++) waits[3] += waits[c];  // the fabric: as tables count it
  return { name: s.name, busy, waits, ops, links: links.length ? Math.max(...links) : null };
}

function fillRange(panel, range) {
  make("h2", "", `${duration(range.b - range.a)} from ${duration(range.a)} to ${duration(range.b)}`, panel);
  const table = make("table", "", null, panel), head = make("tr", "", null, table);
  for (const name of ["schedule", "computing", ...[2, 3, 4].map(c => HEAD.styles[WAIT + c].label), "ends", "ops started", "busiest WAN"])
    make("th", name === "schedule" ? "" : "n", name, head);
  for (const row of range.rows) {
    const line = make("tr", "", null, table);
    make("td", "name", row.name, line);
    for (const share of [row.busy, row.waits[2], row.waits[3], row.waits[4], row.waits[0] + row.waits[1]]) make("td", "n", percent(share), line);
    make("td", "n", String(row.ops), line);
    make("td", "n", row.links === null ? "–" : percent(row.links), line);
  }
  const bar = closer(panel, () => selectRange(0, 0)), zoom = make("button", "", "zoom to it");
  bar.prepend(zoom);
  zoom.addEventListener("click", () => show(range.a, range.b));
}

function drawRange(ctx, h) {
  if (!inspected.range) return;
  ctx.fillStyle = Paint.accent; ctx.globalAlpha = 0.12;
  for (const s of view.beside ? view.schedules : view.schedules.slice(0, 1)) {
    const p = pane(s), left = GUTTER + p.left, x0 = Math.max(left, toX(inspected.range.a, s)), x1 = Math.min(left + p.width, toX(inspected.range.b, s));
    if (x1 > x0) ctx.fillRect(x0, 0, x1 - x0, h);
  }
  ctx.globalAlpha = 1;
}

// ---- search -----------------------------------------------------------------------------------------------------

/** Every span that is called `3F17`, or `3SEND_F17` on a link. */
function findOps(text) {
  const match = /^\s*(\d+)\s*([A-Za-z_]+?)\s*(\d+)\s*$/.exec(text), found = [];
  if (!match) return found;
  const stage = Number(match[1]), word = match[2].toUpperCase(), mb = Number(match[3]);
  const code = word === "SEND_F" ? SEND : word === "SEND_B" ? SEND + 1 : HEAD.kinds.indexOf(word);
  if (code < 0) return found;
  for (const s of view.schedules) for (let row = 0; row < s.rowName.length; row++)
    for (let i = s.ptr[row]; i < s.ptr[row + 1]; i++)
      if (s.code[i] === code && s.stage[i] === stage && s.mb[i] === mb) found.push({ s, row, i });
  return found;
}

function goTo(what) {
  const { s, row, i } = what, a = s.start[i], b = s.end[i], group = s.rowGroup[row];
  if (group.folded) fold(group, false);
  if (b - a > view.t1 - view.t0) show(a - (b - a), b + (b - a));
  else if (a < view.t0 || b > view.t1) { const half = (view.t1 - view.t0) / 2; show((a + b) / 2 - half, (a + b) / 2 + half); }
  const box = rowBox(s, row), room = size(plot).h;
  if (box && (box.y < RULER || box.y + box.h > room)) view.scroll += box.y - room / 2;
  pinSpan(what);
  redraw();
}

function listenSearch() {
  const input = $("search");
  input.addEventListener("keydown", event => {
    if (event.key === "Escape") { input.blur(); return; }
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (input.value !== inspected.text) { inspected.text = input.value; inspected.matches = findOps(input.value); inspected.at = -1; }
    const count = inspected.matches.length;
    inspected.at = count ? (inspected.at + (event.shiftKey ? count - 1 : 1)) % count : -1;
    $("found").textContent = count ? `${inspected.at + 1} of ${count}` : "no such op";
    if (count) goTo(inspected.matches[inspected.at]);
  });
}

function matchFolds() {
  const first = view.schedules[0];
  for (const s of view.schedules) s.groups.forEach((group, k) => { group.folded = first.groups[k].folded; });
}
