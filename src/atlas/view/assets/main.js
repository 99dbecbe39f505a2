// The view: what part of the run is shown, how rows are laid out, and how the user moves. Everything is redrawn from
// `view` in one animation frame; hovering only redraws the transparent canvas on top. Schedules lie above each other on
// one time axis, or in panes beside each other that show the same window of time.

const $ = id => document.getElementById(id);
const GUTTER = 168, RULER = 24, BAR = 10, MARGIN = 1.02, PANE_GAP = 12;
const HEIGHT = { schedule: 28, group: 19, folded: 46, foldedLinks: 30, thin: 3, thick: 30 };
const view = { t0: 0, t1: 1, scroll: 0, rowHeight: 18, path: false, beside: false, schedules: [], items: [], total: 0, extent: 1 };
const raster = new Raster(), small = new Raster();
const frames = [];
let thinnest = 10;  // of rows that are fitted to the screen
let plot, over, overview, hover = null, drag = null, queued = false;

// ---- layout: a list of {kind, y, h}, rebuilt when something folds or rows change height ---------------------------

function layOut() {
  const items = [];
  let y = 4, lowest = 0;
  // Beside each other, a group is as tall in every pane as in the one that has most rows, so that rows lie at one height.
  const count = (s, k) => view.beside ? Math.max(...view.schedules.map(one => one.groups[k].rows.length)) : s.groups[k].rows.length;
  for (const s of view.schedules) {
    if (view.beside) y = 4;
    items.push({ kind: "schedule", s, y, h: HEIGHT.schedule }); y += HEIGHT.schedule;
    s.groups.forEach((group, k) => {
      const h = !group.folded ? HEIGHT.group : group.links ? HEIGHT.foldedLinks : HEIGHT.folded;
      items.push({ kind: "group", s, group, y, h }); y += h + (group.folded ? 3 : 0);
      if (group.folded) return;
      const height = group.links ? Math.max(HEIGHT.thin, Math.min(view.rowHeight, 14)) : view.rowHeight;
      items.push({ kind: "rows", s, group, y, h: height * group.rows.length, rowHeight: height });
      y += height * count(s, k) + 3;
    });
    y += 8;
    lowest = Math.max(lowest, y);
  }
  view.items = items; view.total = lowest;
}

const size = canvas => ({ w: canvas.clientWidth, h: canvas.clientHeight });
const plotWidth = () => Math.max(50, size(plot).w - GUTTER - BAR);

/** Where a schedule is drawn, from the gutter on: everywhere, or in its own pane. */
function pane(s) {
  const whole = plotWidth(), n = view.schedules.length;
  if (!view.beside) return { left: 0, width: whole };
  const width = (whole - (n - 1) * PANE_GAP) / n;
  return { left: view.schedules.indexOf(s) * (width + PANE_GAP), width };
}
function scheduleAt(x) {
  const inside = s => { const p = pane(s); return x < GUTTER + p.left + p.width + PANE_GAP / 2; };
  return view.schedules.find(inside) || view.schedules[view.schedules.length - 1];
}
/** Panes beside each other share the names of workers, so all schedules must have the same. */
const alike = () => view.schedules.length > 1 && new Set(view.schedules.map(s => JSON.stringify(s.groups.map(g => [g.name, g.links || g.rows])))).size === 1;
const toX = (t, s = view.schedules[0]) => { const p = pane(s); return GUTTER + p.left + (t - view.t0) / (view.t1 - view.t0) * p.width; };
const toT = x => { const p = pane(scheduleAt(x)); return view.t0 + (x - GUTTER - p.left) / p.width * (view.t1 - view.t0); };
const maxScroll = () => Math.max(0, view.total - (size(plot).h - RULER));

function clampView() {
  const span = Math.min(Math.max(view.t1 - view.t0, 50), view.extent);
  view.t0 = Math.min(Math.max(view.t0, 0), view.extent - span);
  view.t1 = view.t0 + span;
  view.scroll = Math.min(Math.max(view.scroll, 0), maxScroll());
}

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; drawAll(); });
}

// ---- drawing --------------------------------------------------------------------------------------------------

function fitCanvas(canvas) {
  const ratio = window.devicePixelRatio || 1, { w, h } = size(canvas);
  const width = Math.round(w * ratio), height = Math.round(h * ratio);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { ctx, w, h, ratio };
}

function drawAll() {
  const began = performance.now();
  clampView();
  drawPlot();
  drawOverview();
  drawOver();
  frames.push(performance.now() - began);
  if (frames.length > 600) frames.shift();
}

function visibleItems(height) {
  return view.items.filter(item => item.y + item.h > view.scroll && item.y < view.scroll + height - RULER);
}

function drawPlot() {
  const { ctx, w, h, ratio } = fitCanvas(plot), width = plotWidth();
  raster.resize(Math.round(width * ratio), Math.round((h - RULER) * ratio));
  raster.clear();
  const labels = [], items = visibleItems(h);
  for (const item of items) {
    const p = pane(item.s);
    raster.window(Math.round(p.left * ratio), Math.round(p.width * ratio));
    if (item.kind === "rows") rasterRows(item, raster.columns / (view.t1 - view.t0), ratio, h, labels);
    else if (item.kind === "group" && item.group.folded) rasterFolded(item, ratio);
  }
  ctx.fillStyle = Paint.back;
  ctx.fillRect(0, 0, w, h);
  ctx.putImageData(raster.image, Math.round(GUTTER * ratio), Math.round(RULER * ratio));
  drawRuler(ctx, w, h);
  ctx.save();
  ctx.beginPath(); ctx.rect(0, RULER, w, h - RULER); ctx.clip();
  drawLabels(ctx, labels, ratio);
  for (const item of items) drawHeading(ctx, item, w);
  drawEnds(ctx, h);
  ctx.restore();
  drawScrollbar(ctx, w, h);
}

function rasterRows(item, scale, ratio, h, labels) {
  const { s, group, rowHeight } = item, top = item.y - view.scroll;
  const from = Math.max(0, Math.floor(-top / rowHeight));
  const to = Math.min(group.rows.length, Math.ceil((h - RULER - top) / rowHeight));
  const air = rowHeight >= 12 ? 2 : rowHeight >= 6 ? 1 : 0;
  const labelled = rowHeight >= 10 ? 8 * ratio : Infinity;
  for (let j = from; j < to; j++) {
    const y = top + j * rowHeight, y0 = Math.round(y * ratio), y1 = Math.round((y + rowHeight - air) * ratio);
    raster.row(s, group.first + j, view.t0, scale, y0, Math.max(y0 + 1, y1),
      (i, x0, x1) => labels.push({ s, i, x: (raster.left + x0) / ratio, w: (x1 - x0) / ratio, y: y + (rowHeight - air) / 2, h: rowHeight }), labelled);
  }
}

function rasterFolded(item, ratio) {
  const y = item.y - view.scroll;
  const shares = groupShares(item.s, item.group, view.t0, view.t1, raster.columns);
  raster.stack(shares, raster.left, raster.columns, Math.round((y + 2) * ratio), Math.round((y + item.h) * ratio));
}

function drawLabels(ctx, labels) {
  ctx.textAlign = "center"; ctx.textBaseline = "middle";
  let font = "", letter = 6;
  for (const { s, i, x, w, y, h } of labels) {
    const text = spanLabel(s, i, w);
    if (!text) continue;
    const wanted = (h >= 16 ? "11px" : "9.5px") + " system-ui, 'DejaVu Sans', sans-serif";
    if (wanted !== font) { ctx.font = font = wanted; letter = ctx.measureText("0").width; }
    const wait = s.code[i] >= WAIT && s.code[i] < SEND;
    if (text.length * letter + 3 > w) continue;
    if (wait) {  // without hatching under the label
      const half = text.length * 3.2 + 3;
      ctx.fillStyle = colorOf(s.code[i]);
      ctx.fillRect(GUTTER + x + w / 2 - half, RULER + y - h / 2 + 2, 2 * half, h - 6);
    }
    ctx.fillStyle = wait ? Paint.soft : Paint.ink[s.code[i]];
    ctx.fillText(text, GUTTER + x + w / 2, RULER + y + 0.5);
  }
}

function drawHeading(ctx, item, w) {
  const y = RULER + item.y - view.scroll, { s, group } = item, p = pane(s);
  const first = !view.beside || s === view.schedules[0], from = first ? 0 : GUTTER + p.left, to = view.beside ? GUTTER + p.left + p.width : w - BAR;
  ctx.textBaseline = "middle"; ctx.textAlign = "left";
  if (item.kind === "schedule") {
    ctx.save(); ctx.beginPath(); ctx.rect(from, y, to - from, item.h); ctx.clip();
    ctx.fillStyle = Paint.panel; ctx.fillRect(from, y, to - from, item.h);
    ctx.fillStyle = Paint.text; ctx.font = "650 14px system-ui, 'DejaVu Sans', sans-serif";
    ctx.fillText(s.name, from + 12, y + item.h / 2);
    const at = from + 12 + ctx.measureText(s.name).width + 12;
    ctx.font = "700 10.5px system-ui, 'DejaVu Sans', sans-serif"; ctx.fillStyle = Paint.accent;
    ctx.fillText(s.source.toUpperCase(), at, y + item.h / 2 + 1);
    ctx.font = "12px system-ui, 'DejaVu Sans', sans-serif"; ctx.fillStyle = Paint.soft;
    ctx.fillText(`one iteration ${duration(s.figures.iteration_s * 1e9)} · accelerators busy ${percent(s.figures.utilization)} · ${counted(s.figures.num_workers, "workers")}`,
      at + s.source.length * 8.6 + 10, y + item.h / 2 + 1);
    ctx.restore();
  } else if (item.kind === "group") {
    const middle = y + (!group.folded ? item.h / 2 : group.links ? 9 : 14);
    if (!group.folded) { ctx.strokeStyle = Paint.line; ctx.beginPath(); ctx.moveTo(from, y + item.h - 1.5); ctx.lineTo(to, y + item.h - 1.5); ctx.stroke(); }
    if (!first) return;
    ctx.fillStyle = Paint.text; ctx.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
    const name = clipText(ctx, `${group.folded ? "▸" : "▾"} ${group.name}`, GUTTER - 14), after = 16 + ctx.measureText(name).width;
    ctx.fillText(name, 10, middle);
    ctx.fillStyle = Paint.soft; ctx.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    const count = counted(group.rows.length, group.what);
    if (group.folded) ctx.fillText(count, 22, middle + (group.links ? 14 : 16));
    // Left of the plot, where no line crosses it; the number alone if there is no room for more.
    else ctx.fillText([count, String(group.rows.length)].find(text => after + ctx.measureText(text).width < GUTTER) || "", after, middle);
  } else if (first) drawRowNames(ctx, item, y);
}

function drawRowNames(ctx, item, y) {
  const step = Math.ceil(10 / item.rowHeight);
  ctx.font = item.rowHeight >= 14 ? "11.5px system-ui, 'DejaVu Sans', sans-serif" : "9.5px system-ui, 'DejaVu Sans', sans-serif";
  ctx.fillStyle = Paint.soft;
  const bottom = size(plot).h;
  for (let j = 0; j < item.group.rows.length; j += step) {
    // A name that stands for several thin rows is at their middle, not over the heading.
    const at = y + (j + Math.min(step, item.group.rows.length - j) / 2) * item.rowHeight - (item.rowHeight >= 12 ? 1 : 0);
    if (at < RULER - 10 || at > bottom + 10 || !item.group.rows[j]) continue;
    ctx.fillText(clipText(ctx, item.group.rows[j], GUTTER - 34), 26, at);
  }
}

function drawRuler(ctx, w, h) {
  ctx.fillStyle = Paint.panel; ctx.fillRect(0, 0, w, RULER);
  const panes = view.beside ? view.schedules : view.schedules.slice(0, 1), { step, found } = ticks(view.t0, view.t1, pane(panes[0]).width);
  ctx.font = "11px system-ui, 'DejaVu Sans', sans-serif"; ctx.textBaseline = "middle"; ctx.textAlign = "left";
  ctx.strokeStyle = Paint.line;
  for (const s of panes) for (const t of found) {
    const x = Math.round(toX(t, s)) + 0.5, p = pane(s);
    if (x > GUTTER + p.left + p.width - 36) continue;  // its label would be cut
    ctx.beginPath(); ctx.moveTo(x, 0); ctx.lineTo(x, RULER); ctx.stroke();
    ctx.fillStyle = Paint.soft;
    ctx.fillText(tickLabel(t, step), x + 4, RULER / 2 + 1);
  }
  ctx.fillStyle = Paint.panel; ctx.fillRect(0, 0, GUTTER, RULER);
  ctx.fillStyle = Paint.soft; ctx.fillText("showing " + duration(view.t1 - view.t0), 12, RULER / 2 + 1);
}

/** Marks the end of each schedule's run, and of each step in it. */
function drawEnds(ctx, h) {
  ctx.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  for (const s of view.schedules) {
    const mine = view.items.filter(item => item.s === s), x = toX(s.makespan, s), p = pane(s), edge = GUTTER + p.left + p.width;
    const last = mine[mine.length - 1], y0 = RULER + mine[0].y + mine[0].h - view.scroll, y1 = RULER + last.y + last.h - view.scroll;
    drawSteps(ctx, s, p, y0, y1);
    if (x < GUTTER + p.left || x > edge + 1) continue;
    ctx.strokeStyle = Paint.text; ctx.lineWidth = 1.5;
    ctx.beginPath(); ctx.moveTo(x, y0); ctx.lineTo(x, y1); ctx.stroke(); ctx.lineWidth = 1;
    const text = "end " + duration(s.makespan), wide = ctx.measureText(text).width + 8;
    const right = x + wide + 4 < edge;
    ctx.fillStyle = Paint.back; ctx.globalAlpha = 0.75; ctx.fillRect(right ? x + 1 : x - wide - 1, y0 + 2, wide, 15); ctx.globalAlpha = 1;
    ctx.fillStyle = Paint.text; ctx.textAlign = right ? "left" : "right"; ctx.textBaseline = "middle";
    ctx.fillText(text, right ? x + 5 : x - 5, y0 + 10);
  }
}

function drawSteps(ctx, s, p, y0, y1) {
  const shown = s.steps.map((t, k) => [toX(t, s), k]).filter(([x]) => x >= GUTTER + p.left && x <= GUTTER + p.left + p.width);
  if (s.steps.length < 2 || shown.length > p.width / 8) return;  // too many to tell apart
  ctx.textBaseline = "middle"; ctx.textAlign = "right";
  for (const [x, k] of shown) {
    ctx.strokeStyle = Paint.accent; ctx.setLineDash([5, 4]);
    ctx.beginPath(); ctx.moveTo(x, y0); ctx.lineTo(x, y1); ctx.stroke(); ctx.setLineDash([]);
    if (k === s.steps.length - 1 || shown.length > p.width / 70) continue;
    const text = `step ${s.firstStep + k} ends`, wide = ctx.measureText(text).width + 6;
    if (x - wide < GUTTER + p.left) continue;
    ctx.fillStyle = Paint.back; ctx.globalAlpha = 0.8; ctx.fillRect(x - wide - 1, y0 + 2, wide, 15); ctx.globalAlpha = 1;
    ctx.fillStyle = Paint.accent; ctx.fillText(text, x - 4, y0 + 10);
  }
}

function drawScrollbar(ctx, w, h) {
  const room = h - RULER, most = maxScroll();
  if (!most) return;
  ctx.fillStyle = Paint.panel; ctx.fillRect(w - BAR, RULER, BAR, room);
  const thumb = Math.max(24, room * room / view.total);
  ctx.fillStyle = Paint.soft; ctx.globalAlpha = 0.6;
  ctx.fillRect(w - BAR + 2, RULER + view.scroll / most * (room - thumb), BAR - 4, thumb);
  ctx.globalAlpha = 1;
}

function drawOverview() {
  const { ctx, w, h, ratio } = fitCanvas(overview), columns = Math.round(plotWidth() * ratio);
  const key = [columns, h, ratio, document.documentElement.dataset.theme].join();
  if (small.key !== key) {
    small.key = key;
    small.resize(columns, Math.round(h * ratio));
    small.clear();
    const each = (h - 8) / view.schedules.length;
    view.schedules.forEach((s, k) => {
      const workers = s.groups.filter(g => !g.links), total = new Float32Array(columns * NUM_CODES);
      const all = workers.reduce((n, g) => n + g.last - g.first, 0);
      for (const group of workers) {
        const shares = groupShares(s, group, 0, view.extent, columns), part = (group.last - group.first) / all;
        for (let i = 0; i < total.length; i++) total[i] += part * shares[i];
      }
      small.stack(total, 0, columns, Math.round((4 + k * each) * ratio), Math.round((4 + (k + 1) * each - 3) * ratio));
    });
  }
  ctx.fillStyle = Paint.back; ctx.fillRect(0, 0, w, h);
  ctx.putImageData(small.image, Math.round(GUTTER * ratio), 0);
  ctx.font = "11px system-ui, 'DejaVu Sans', sans-serif"; ctx.fillStyle = Paint.soft; ctx.textBaseline = "middle"; ctx.textAlign = "left";
  const each = (h - 8) / view.schedules.length;
  view.schedules.forEach((s, k) => ctx.fillText(clipText(ctx, s.name, GUTTER - 20), 12, 4 + (k + 0.5) * each));
  const x0 = GUTTER + view.t0 / view.extent * plotWidth(), x1 = GUTTER + view.t1 / view.extent * plotWidth();
  ctx.fillStyle = Paint.back; ctx.globalAlpha = 0.65;
  ctx.fillRect(GUTTER, 0, x0 - GUTTER, h); ctx.fillRect(x1, 0, GUTTER + plotWidth() - x1, h);
  ctx.globalAlpha = 1; ctx.strokeStyle = Paint.accent; ctx.lineWidth = 1.5;
  ctx.strokeRect(x0 + 0.75, 1, Math.max(2, x1 - x0 - 1.5), h - 2); ctx.lineWidth = 1;
}
