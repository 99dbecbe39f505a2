// Pointing and moving: the hovered span and the path of its microbatch, the critical path, wheel, drag and keys. Draws only
// on the transparent canvas; changes `view` and asks for a redraw.

function itemAt(x, y) {
  const at = y - RULER + view.scroll, s = view.beside ? scheduleAt(x) : null;
  return y < RULER ? undefined : view.items.find(item => at >= item.y && at < item.y + item.h && (!s || item.s === s));
}

function pick(x, y) {
  const item = itemAt(x, y);
  if (!item) return null;
  const t = toT(x), found = { item, t, x, y, row: -1, i: -1 };
  if (item.kind === "rows") {
    found.row = item.group.first + Math.floor((y - RULER + view.scroll - item.y) / item.rowHeight);
    if (x >= GUTTER) found.i = spanAt(item.s, found.row, t);
  }
  return found;
}

function rowBox(s, row) {
  for (const item of view.items) {
    if (item.kind !== "rows" || item.s !== s || row < item.group.first || row >= item.group.last) continue;
    const y = RULER + item.y - view.scroll + (row - item.group.first) * item.rowHeight;
    return { y, h: item.rowHeight - (item.rowHeight >= 12 ? 2 : item.rowHeight >= 6 ? 1 : 0) };
  }
  return null;
}

function outline(ctx, s, row, a, b, color, width) {
  const box = rowBox(s, row);
  if (!box || box.y > size(plot).h || box.y + box.h < RULER) return;
  const p = pane(s), left = GUTTER + p.left, right = left + p.width;
  const x0 = Math.max(left - 4, toX(a, s)), x1 = Math.min(right + 4, toX(b, s));
  if (x1 < left || x0 > right) return;
  ctx.strokeStyle = color; ctx.lineWidth = width;
  ctx.strokeRect(x0, box.y, Math.max(2, x1 - x0), Math.max(2, box.h));
}

function drawOver() {
  const { ctx, w, h } = fitCanvas(over);
  ctx.clearRect(0, 0, w, h);
  ctx.save();
  ctx.beginPath(); ctx.rect(GUTTER, RULER, plotWidth(), h - RULER); ctx.clip();
  if (view.path) view.schedules.forEach(s => drawPath(ctx, s));
  if (hover && hover.i >= 0) drawMicrobatch(ctx, hover, h);
  drawPin(ctx);
  ctx.restore();
  drawRange(ctx, h);
  if (drag && drag.select) {
    ctx.fillStyle = Paint.accent; ctx.globalAlpha = 0.18;
    ctx.fillRect(Math.min(drag.x, drag.to), 0, Math.abs(drag.to - drag.x), h); ctx.globalAlpha = 1;
  } else if (hover && hover.x >= GUTTER && hover.x <= GUTTER + plotWidth()) {
    ctx.strokeStyle = Paint.soft; ctx.globalAlpha = 0.5; ctx.lineWidth = 1;
    ctx.beginPath(); ctx.moveTo(Math.round(hover.x) + 0.5, RULER - 4); ctx.lineTo(Math.round(hover.x) + 0.5, h); ctx.stroke();
    ctx.globalAlpha = 1;
  }
}

/** Outlines one microbatch on the visible rows of its pipeline. */
function drawMicrobatch(ctx, at, h) {
  const { s } = at.item, mb = s.mb[at.i], pipeline = s.pipeline[at.i], code = s.code[at.i];
  const follows = code < 5 || code >= SEND;
  for (const item of follows ? visibleItems(h) : []) {
    if (item.kind !== "rows" || item.s !== s) continue;
    for (let j = 0; j < item.group.rows.length; j++) {
      if (!item.group.links && item.group.pipelines[j] !== pipeline) continue;
      const row = item.group.first + j;
      for (let i = spanBefore(s, row, view.t0); i < s.ptr[row + 1] && s.start[i] < view.t1; i++)
        if (s.mb[i] === mb && s.pipeline[i] === pipeline && (s.code[i] < 5 || s.code[i] >= SEND))
          outline(ctx, s, row, s.start[i], s.end[i], Paint.text, 1.5);
    }
  }
  outline(ctx, s, at.row, s.start[at.i], s.end[at.i], Paint.text, 2.5);
}

/** Where a row is drawn: itself, or the strip that its folded group has become. */
function placeOf(s, row) {
  const strip = view.items.find(item => item.kind === "group" && item.s === s && item.group.folded && row >= item.group.first && row < item.group.last);
  return strip ? { y: RULER + strip.y - view.scroll, h: strip.h } : rowBox(s, row);
}

function drawPath(ctx, s) {
  let last = null;
  const places = new Map(), p = pane(s);
  ctx.save(); ctx.beginPath(); ctx.rect(GUTTER + p.left, RULER, p.width, size(plot).h); ctx.clip();
  ctx.lineJoin = "round";
  for (const [a, b, category, worker] of s.path) {
    if (!places.has(worker)) places.set(worker, placeOf(s, s.rowOfWorker[worker]));
    const box = places.get(worker);
    const y = box.y + box.h - 1, x0 = toX(a, s), x1 = toX(b, s), moved = category !== "compute" && category !== "sync";
    if (last && last.y !== y) { ctx.strokeStyle = "#d0006f"; ctx.lineWidth = 1.5; ctx.beginPath(); ctx.moveTo(last.x, last.y); ctx.lineTo(x0, y); ctx.stroke(); }
    if (x1 >= GUTTER && x0 <= GUTTER + plotWidth()) {
      ctx.strokeStyle = "#d0006f"; ctx.lineWidth = moved ? 1.5 : 3;
      ctx.setLineDash(moved ? [4, 3] : []);
      ctx.beginPath(); ctx.moveTo(x0, y); ctx.lineTo(x1, y); ctx.stroke(); ctx.setLineDash([]);
    }
    last = { x: x1, y };
  }
  ctx.restore();
}

function showTip(at) {
  const tip = $("tip");
  tip.replaceChildren();
  if (at && at.i >= 0) tipForSpan(tip, at.item.s, at.row, at.i);
  else if (at && at.item.kind === "group" && at.item.group.folded && at.x >= GUTTER && at.t <= view.extent) {
    const nap = (view.t1 - view.t0) / pane(at.item.s).width;
    tipForShares(tip, at.item.s, at.item.group, measureShares(at.item.s, at.item.group.first, at.item.group.last, at.t, at.t + nap, 1), at.t);
  }
  tip.hidden = !tip.childElementCount;
  if (tip.hidden) return;
  const { w, h } = size(plot), box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, at.x + 16 + box.width > w ? at.x - box.width - 12 : at.x + 16) + "px";
  tip.style.top = Math.max(4, Math.min(at.y + 14, h - box.height - 6)) + "px";
}

// ---- moving -----------------------------------------------------------------------------------------------------

function zoomAt(t, factor) {
  const span = Math.min(view.extent, Math.max(50, (view.t1 - view.t0) * factor));
  const left = (t - view.t0) / (view.t1 - view.t0);
  view.t0 = t - left * span; view.t1 = view.t0 + span;
  redraw();
}
function show(t0, t1) { view.t0 = t0; view.t1 = t1; redraw(); }
function pan(share) { const d = (view.t1 - view.t0) * share; show(view.t0 + d, view.t1 + d); }
function scrollBy(pixels) { view.scroll += pixels; redraw(); }
function setRowHeight(height) {
  const part = view.scroll / Math.max(1, view.total);
  view.rowHeight = Math.min(HEIGHT.thick, Math.max(HEIGHT.thin, height));
  layOut(); view.scroll = part * view.total; redraw();
}
/** Panes beside each other fold together, so that their rows stay at one height. */
function fold(group, folded) {
  const k = view.schedules.find(s => s.groups.includes(group)).groups.indexOf(group);
  for (const s of view.beside ? view.schedules : []) s.groups[k].folded = folded;
  group.folded = folded; layOut(); redraw();
}
function foldAll(folded) { for (const s of view.schedules) for (const g of s.groups) g.folded = folded; layOut(); redraw(); }

function onWheel(event) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 300 : 1, dx = event.deltaX * unit, dy = event.deltaY * unit;
  if (event.shiftKey || event.offsetX < GUTTER) return scrollBy(dy || dx);
  if (Math.abs(dx) > Math.abs(dy)) return pan(dx / pane(scheduleAt(event.offsetX)).width);
  zoomAt(toT(event.offsetX), Math.exp(Math.max(-200, Math.min(200, dy)) * 0.0022));
}

function onDown(event) {
  plot.setPointerCapture(event.pointerId);
  plot.focus({ preventScroll: true });
  const { w } = size(plot);
  drag = { x: event.offsetX, y: event.offsetY, to: event.offsetX, t0: view.t0, t1: view.t1, scroll: view.scroll, moved: false,
    select: (event.offsetY < RULER || event.shiftKey) && event.offsetX > GUTTER, bar: event.offsetX > w - BAR };
}

function onMove(event) {
  const x = event.offsetX, y = event.offsetY;
  if (!drag) { hover = pick(x, y); showTip(hover); plot.style.cursor = foldable(hover) ? "pointer" : ""; return drawOver(); }
  if (Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4) drag.moved = true;
  if (!drag.moved) return;
  $("tip").hidden = true; hover = null;
  if (drag.select) { drag.to = x; return drawOver(); }
  if (drag.bar) { view.scroll = drag.scroll + (y - drag.y) / (size(plot).h - RULER) * view.total; return redraw(); }
  plot.classList.add("grab");
  const d = (drag.x - x) / pane(scheduleAt(drag.x)).width * (drag.t1 - drag.t0);
  view.scroll = drag.scroll + drag.y - y;
  show(drag.t0 + d, drag.t1 + d);
}

const foldable = at => at && at.item.kind === "group" && (at.x < GUTTER || !at.item.group.folded);

function onUp(event) {
  const was = drag;
  drag = null; plot.classList.remove("grab");
  if (!was) return;
  if (was.select && was.moved) return selectRange(toT(was.x), toT(was.to));
  const at = pick(event.offsetX, event.offsetY);
  if (was.moved) return;
  if (foldable(at)) fold(at.item.group, !at.item.group.folded);
  else pinSpan(at && at.i >= 0 ? { s: at.item.s, row: at.row, i: at.i } : null);
}

function onDouble(event) {
  const at = pick(event.offsetX, event.offsetY);
  if (!at || at.i < 0) return;
  const a = at.item.s.start[at.i], b = at.item.s.end[at.i];
  show(a - (b - a), b + (b - a));
}

function onOverview(event) {
  if (event.type === "pointerdown") {
    overview.setPointerCapture(event.pointerId);
    overview.from = event.offsetX; overview.whole = view.t1 - view.t0 > 0.98 * view.extent;
  }
  if (!event.buttons || overview.from === undefined) return;
  const time = x => Math.min(1, Math.max(0, (x - GUTTER) / plotWidth())) * view.extent, t = time(event.offsetX);
  const half = (view.t1 - view.t0) / 2, from = time(overview.from);
  if (!overview.whole) show(t - half, t + half);
  else if (Math.abs(event.offsetX - overview.from) > 6) show(Math.min(t, from), Math.max(t, from));
}

const KEYS = {
  w: () => zoomAt((view.t0 + view.t1) / 2, 0.7), s: () => zoomAt((view.t0 + view.t1) / 2, 1 / 0.7),
  "+": () => KEYS.w(), "=": () => KEYS.w(), "-": () => KEYS.s(), a: () => pan(-0.15), d: () => pan(0.15),
  ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), ArrowUp: () => scrollBy(-60), ArrowDown: () => scrollBy(60),
  PageUp: () => scrollBy(-500), PageDown: () => scrollBy(500), 0: () => show(0, view.extent), f: () => show(0, view.extent),
  "[": () => setRowHeight(view.rowHeight * 0.75), "]": () => setRowHeight(view.rowHeight / 0.75 + 0.5),
  c: () => $("toggle-path").click(), h: () => $("toggle-head").click(), v: () => { if (!$("beside").hidden) $("beside").click(); }, 1: () => showStep(),
  "/": () => $("search").focus(), Escape: () => { pinSpan(null); selectRange(0, 0); },
};

function listen() {
  plot.addEventListener("wheel", onWheel, { passive: false });
  plot.addEventListener("pointerdown", onDown);
  plot.addEventListener("pointermove", onMove);
  plot.addEventListener("pointerup", onUp);
  plot.addEventListener("dblclick", onDouble);
  plot.addEventListener("pointerleave", () => { hover = null; showTip(null); drawOver(); });
  overview.addEventListener("pointerdown", onOverview);
  overview.addEventListener("pointermove", onOverview);
  overview.addEventListener("pointerup", () => { overview.from = undefined; });
  addEventListener("keydown", event => {
    const act = KEYS[event.key] || KEYS[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault(); act();
  });
  new ResizeObserver(redraw).observe($("stage"));
  const press = (id, act) => $(id).addEventListener("click", act);
  press("fit", () => show(0, view.extent)); press("one", () => showStep());
  press("beside", event => { view.beside = !view.beside; event.target.setAttribute("aria-pressed", view.beside); if (view.beside) matchFolds(); fitRows(false); redraw(); });
  listenSearch();
  press("expand", () => foldAll(false)); press("collapse", () => foldAll(true));
  press("thinner", KEYS["["]); press("thicker", KEYS["]"]);
  press("toggle-path", event => { view.path = !view.path; event.target.setAttribute("aria-pressed", view.path); redraw(); });
  press("toggle-head", () => { $("figures").hidden = !$("figures").hidden; redraw(); });
  press("theme", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  loadPaint(); fillHeader(view.schedules); redraw();
}

/** Fits everything on one screen where possible: rows as tall as fit, links folded before rows get too thin to read. */
function fitRows(many) {
  const tallest = many ? 6 : 22, fits = () => { layOut(); return view.total <= size(plot).h - RULER; };
  for (const limit of many ? [Infinity] : [Infinity, 4]) {
    for (const s of view.schedules) for (const g of s.groups) if (g.links && g.rows.length > limit) g.folded = true;
    for (view.rowHeight = tallest; view.rowHeight > thinnest && !fits();) view.rowHeight--;
    if (fits()) return;
  }
}

function layOutSchedules(schedules) {
  view.schedules = schedules;
  view.extent = Math.max(...view.schedules.map(s => s.makespan)) * MARGIN;
  const many = view.schedules.reduce((n, s) => n + s.rowName.length, 0) > 120;
  for (const s of view.schedules) for (const g of s.groups) g.folded = many;
  overview.style.height = 10 + 18 * view.schedules.length + "px";
  $("beside").hidden = !alike(); $("one").hidden = !view.schedules.some(s => s.steps.length > 1);
  return many;
}

/** One step at the middle of the run; of the shortest run, so that every schedule has something to show. */
const showFirst = () => showStep(Math.min(...view.schedules.map(s => s.makespan)) / 2);

/** Draws the schedules of HEAD for the first time. `texts`: the packed spans of each. */
async function openRun(texts) {
  plot = $("plot"); over = $("over"); overview = $("overview");
  const many = layOutSchedules(await Promise.all(texts.map((text, k) => loadSchedule(k, text))));
  view.t1 = view.extent;
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  fitRows(many); listen(); showFirst(); redraw();
  // For tests and for the browser's console.
  window.atlas = { view, frames, toX, toT, rowBox, inspected, spanName, zoomAt, show, foldAll, setRowHeight, drawAll, setTheme };
  document.documentElement.dataset.ready = "yes";
}

/** Draws other schedules in place of those on the page: a live run goes on. The window of time, the heights of rows and what
    is folded stay where the groups are the same. */
async function replaceRun(header, texts) {
  const before = view.schedules, extent = view.extent, whole = view.t1 - view.t0 > 0.98 * extent, folded = new Map();
  for (const s of before) for (const g of s.groups) folded.set(s.source + g.name, g.folded);
  HEAD = header;
  const schedules = await Promise.all(texts.map((text, k) => loadSchedule(k, text)));
  const same = schedules.length === before.length && schedules.every((s, k) => s.rowName.length === before[k].rowName.length);
  if (inspected.pin) pinSpan(null);
  if (inspected.range) selectRange(0, 0);
  inspected.matches = []; inspected.at = -1; hover = null; small.key = "";
  const many = layOutSchedules(schedules);
  if (same) {
    for (const s of schedules) for (const g of s.groups) g.folded = folded.get(s.source + g.name) ?? g.folded;
    layOut();
    if (whole) show(0, view.extent);
  } else { view.scroll = 0; fitRows(many); show(0, view.extent); showFirst(); }
  fillHeader(view.schedules); redraw();
}
