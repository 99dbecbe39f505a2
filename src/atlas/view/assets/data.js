// Data: unpacks the spans that page.py packed, and answers "what is at time t of row r" and "what share of a
// group does what". Knows no pixels of the screen and no colours.

let HEAD = JSON.parse(document.getElementById("header").textContent);  // a live page replaces it
const CAUSE = HEAD.causes, NUM_KINDS = HEAD.kinds.length, NUM_CAUSES = CAUSE.length;
const WAIT = NUM_KINDS, SEND = WAIT + NUM_CAUSES, NUM_CODES = SEND + 2;
const CAUSE_ORDER = [...CAUSE.keys()].slice(2).concat([0, 1]);  // fill and drain last
const OVERVIEW_BINS = 4096;

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function loadSchedule(k, text) {
  const buffer = await inflate(text);
  const [count, numRows] = new Float64Array(buffer, 0, 2);
  let at = 16;
  const take = (type, n) => { const part = new type(buffer, at, n); at += n * type.BYTES_PER_ELEMENT; return part; };
  const gap = take(Float64Array, count), length = take(Float64Array, count);
  const queued = take(Float64Array, count), latency = take(Float64Array, count);
  const perRow = take(Uint32Array, numRows), mb = take(Uint32Array, count);
  const stage = take(Uint16Array, count), pipeline = take(Uint16Array, count), code = take(Uint8Array, count);
  const ptr = new Uint32Array(numRows + 1);
  for (let r = 0; r < numRows; r++) {
    ptr[r + 1] = ptr[r] + perRow[r];
    for (let i = ptr[r], t = 0; i < ptr[r + 1]; i++) { gap[i] += t; t = length[i] += gap[i]; }
  }
  return finishSchedule({ k, ...HEAD.schedules[k], start: gap, end: length, queued, latency, ptr, mb, stage, pipeline, code });
}

function finishSchedule(s) {
  let row = 0;
  s.rowOfWorker = [];
  s.rowName = []; s.rowGroup = [];
  for (const group of s.groups) {
    group.first = row; group.last = row + group.rows.length; group.shares = null;
    for (let j = 0; j < group.rows.length; j++) {
      if (!group.links) s.rowOfWorker[group.workers[j]] = row;
      s.rowName.push(group.rows[j]); s.rowGroup.push(group);
      row++;
    }
  }
  return s;
}

/** The last span of a row that starts at or before t, or the row's first. */
function spanBefore(s, row, t) {
  let lo = s.ptr[row], hi = s.ptr[row + 1] - 1;
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (s.start[mid] <= t) lo = mid; else hi = mid - 1;
  }
  return lo;
}

function spanAt(s, row, t) {
  if (s.ptr[row] === s.ptr[row + 1]) return -1;
  const i = spanBefore(s, row, t);
  return s.start[i] <= t && t < s.end[i] ? i : -1;
}

/** [bin, code] share of the rows first..last that do `code` in each of `bins` equal parts of t0..t1. */
function measureShares(s, first, last, t0, t1, bins) {
  const out = new Float32Array(bins * NUM_CODES), k = bins / (t1 - t0);
  for (let row = first; row < last; row++) {
    const stop = s.ptr[row + 1];
    if (s.ptr[row] === stop) continue;
    for (let i = spanBefore(s, row, t0); i < stop; i++) {
      const a = Math.max(0, (s.start[i] - t0) * k), b = Math.min(bins, (s.end[i] - t0) * k);
      if (a >= bins) break;
      if (b <= a) continue;
      const c = s.code[i];
      let x = a | 0;
      if (b <= x + 1) { out[x * NUM_CODES + c] += b - a; continue; }
      out[x * NUM_CODES + c] += x + 1 - a;
      for (x++; x + 1 <= b; x++) out[x * NUM_CODES + c] += 1;
      if (x < bins) out[x * NUM_CODES + c] += b - x;
    }
  }
  const scale = 1 / Math.max(1, last - first);
  for (let i = 0; i < out.length; i++) out[i] *= scale;
  return out;
}

/** Shares per pixel of a window: from a table made once if it is fine enough, else computed again. */
function groupShares(s, group, t0, t1, pixels) {
  if (!group.shares) group.shares = cumulative(measureShares(s, group.first, group.last, 0, s.makespan, OVERVIEW_BINS));
  const perPixel = (t1 - t0) / pixels / s.makespan * OVERVIEW_BINS;
  if (perPixel < 1) return measureShares(s, group.first, group.last, t0, t1, pixels);
  const out = new Float32Array(pixels * NUM_CODES), bin0 = t0 / s.makespan * OVERVIEW_BINS;
  for (let x = 0; x < pixels; x++) {
    const a = bin0 + x * perPixel, b = a + perPixel;
    for (let c = 0; c < NUM_CODES; c++)
      out[x * NUM_CODES + c] = (reach(group.shares, b, c) - reach(group.shares, a, c)) / perPixel;
  }
  return out;
}

function cumulative(shares) {
  const out = new Float64Array(shares.length + NUM_CODES);
  for (let i = 0; i < shares.length; i++) out[i + NUM_CODES] = out[i] + shares[i];
  return out;
}

function reach(table, bin, code) {
  const x = Math.min(Math.max(bin, 0), OVERVIEW_BINS), i = Math.floor(x), part = x - i;
  const at = table[i * NUM_CODES + code];
  return part ? at + part * (table[(i + 1) * NUM_CODES + code] - at) : at;
}

// ---- text ----------------------------------------------------------------------------------------------------

function duration(ns) {
  const a = Math.abs(ns);
  if (a >= 1e9) return (ns / 1e9).toFixed(a >= 1e10 ? 2 : 3) + " s";
  if (a >= 1e6) return (ns / 1e6).toFixed(a >= 1e8 ? 1 : 2) + " ms";
  if (a >= 1e3) return (ns / 1e3).toFixed(2) + " µs";
  return ns.toFixed(0) + " ns";
}

/** `1 worker`, `2 workers`. */
const counted = (count, plural) => `${count} ${count === 1 ? plural.replace(/s\b/, "") : plural}`;

const percent = x => (100 * x).toFixed(x < 0.0995 ? 1 : 0) + " %";

function spanName(s, i) {
  const c = s.code[i];
  if (c < WAIT) return `${s.stage[i]}${HEAD.kinds[c]}${s.mb[i]}`;
  if (c < SEND) return `waiting: ${HEAD.styles[c].label}`;
  return `${s.stage[i]}${c === SEND ? "SEND_F" : "SEND_B"}${s.mb[i]}`;
}
