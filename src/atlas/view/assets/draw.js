// Drawing: rows into a buffer of pixels, level of detail by blending whatever falls into one pixel. Text and lines
// go on top with the canvas's own calls. Knows the layout it is given, not how the user moves it.

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const Paint = { rgb: [], u32: null, edge: null, hatch: null, ink: [], bg: 0, bgRgb: null };

function parseHex(hex) { const v = parseInt(hex.slice(1), 16); return [v >> 16, (v >> 8) & 255, v & 255]; }
const pack = (r, g, b) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const mix = (a, b, w) => a.map((v, i) => Math.round(v * (1 - w) + b[i] * w));
const luminance = c => 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];

function loadPaint() {
  const dark = document.documentElement.dataset.theme === "dark";
  const strong = dark ? [255, 255, 255] : [0, 0, 0];
  Paint.bgRgb = parseHex(css("--bg")); Paint.bg = pack(...Paint.bgRgb);
  Paint.rgb = HEAD.styles.map(style => parseHex(dark ? style.dark : style.light));
  Paint.u32 = Uint32Array.from(Paint.rgb, c => pack(...c));
  Paint.edge = Uint32Array.from(Paint.rgb, c => pack(...mix(c, Paint.bgRgb, 0.55)));
  Paint.hatch = Uint32Array.from(Paint.rgb, c => pack(...mix(c, strong, 0.2)));
  Paint.ink = Paint.rgb.map(c => luminance(c) > 135 ? "#14181c" : "#ffffff");
  Paint.text = css("--ink"); Paint.soft = css("--soft"); Paint.line = css("--line");
  Paint.panel = css("--panel"); Paint.accent = css("--accent"); Paint.back = css("--bg");
}

/** A plot's pixels: `width` x `height` device pixels. */
class Raster {
  resize(width, height) {
    if (this.width === width && this.height === height) return;
    this.width = width; this.height = height;
    this.image = new ImageData(Math.max(1, width), Math.max(1, height));
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.line = new Uint32Array(Math.max(1, width));
    this.runs = [];
    this.window(0, width);
  }
  /** Rows are drawn into these columns only. */
  window(left, columns) { this.left = left; this.columns = Math.max(1, Math.min(columns, this.width - left)); }
  clear() { this.pixels.fill(Paint.bg); }

  /** One row of spans between the pixel rows y0 and y1. `wide(i, x0, x1)` is called for spans that can hold a label. */
  row(s, row, t0, scale, y0, y1, wide, labelWidth) {
    const { line, columns: width } = this, { rgb, u32, edge, bgRgb } = Paint;
    const begin = s.ptr[row], stop = s.ptr[row + 1];
    line.fill(Paint.bg);
    this.runs.length = 0;
    if (begin === stop) return;
    let cell = -1, r = 0, g = 0, b = 0, weight = 0;
    const flush = () => {
      if (weight > 0) {
        const rest = Math.max(0, 1 - weight);
        line[cell] = pack(r + rest * bgRgb[0], g + rest * bgRgb[1], b + rest * bgRgb[2]);
      }
      r = g = b = weight = 0;
    };
    const add = (x, w, color) => {
      if (x !== cell) { flush(); cell = x; }
      r += w * color[0]; g += w * color[1]; b += w * color[2]; weight += w;
    };
    const { start, end, code } = s;
    for (let i = spanBefore(s, row, t0); i < stop; i++) {
      let a = (start[i] - t0) * scale, z = (end[i] - t0) * scale;
      if (a >= width) break;
      if (z <= 0) continue;
      if (a < 0) a = 0;
      if (z > width) z = width;
      const c = code[i], color = rgb[c];
      let x = a | 0;
      const last = z | 0;
      if (x === last) { add(x, z - a, color); continue; }
      if (a > x) { add(x, x + 1 - a, color); x++; }
      if (last > x) {
        line.fill(u32[c], x, last);
        if (c >= WAIT && c < SEND) { if (last - x > 11) this.runs.push(x, last, c); }
        else if (last - x > 3) line[last - 1] = edge[c];
        if (last - x > labelWidth) wide(i, x, last);
      }
      if (z > last && last < width) add(last, z - last, color);
    }
    flush();
    this.stamp(y0, y1);
  }

  /** Copies the finished line to its rows of pixels; long waits are hatched. */
  stamp(y0, y1) {
    const { width, left, columns, pixels, runs } = this, line = this.line.subarray(0, columns);
    for (let y = Math.max(0, y0); y < Math.min(this.height, y1); y++) {
      const base = y * width + left;
      pixels.set(line, base);
      for (let j = 0; j < runs.length; j += 3) {
        const color = Paint.hatch[runs[j + 2]], to = base + runs[j + 1];
        for (let x = base + runs[j] + (8 - (runs[j] + y) % 8) % 8; x < to; x += 8) pixels[x] = color;
      }
    }
  }

  /** Stacked shares, bottom up: work first, then waits; what is left stays empty. */
  stack(shares, x0, columns, y0, y1) {
    const { width, pixels, height } = this, tall = y1 - y0;
    for (let x = 0; x < columns; x++) {
      let level = 0;
      for (let j = 0; j < STACK_ORDER.length; j++) {
        const c = STACK_ORDER[j], share = shares[x * NUM_CODES + c];
        if (share <= 0) continue;
        const from = y1 - Math.round(level * tall);
        level += share;
        const to = y1 - Math.round(Math.min(1, level) * tall);
        for (let y = Math.max(0, to); y < Math.min(height, from); y++) pixels[y * width + x0 + x] = Paint.u32[c];
      }
    }
  }
}

const STACK_ORDER = [0, 1, 2, 3, 4, 7, 8, SEND, SEND + 1, 5, 6, WAIT + 4, WAIT + 2, WAIT + 3, ...CAUSE_ORDER.filter(c => c > 4).map(c => WAIT + c), WAIT, WAIT + 1];

/** Round times for the ruler: about one tick per 110 pixels, at 1, 2 or 5 times a power of ten. */
function ticks(t0, t1, pixels) {
  const rough = (t1 - t0) / Math.max(1, pixels / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map(m => m * power).find(v => v >= rough));
  const found = [];
  for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) found.push(t);
  return { step, found };
}

function tickLabel(t, step) {
  const [unit, name] = step >= 1e8 || t >= 1e9 && step >= 1e7 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : step >= 1e2 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
  return (t / unit).toFixed(Math.min(digits, 3)) + " " + name;
}

function clipText(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let n = text.length;
  while (n > 1 && ctx.measureText(text.slice(0, n) + "…").width > width) n--;
  return text.slice(0, n) + "…";
}

/** The label inside a span: as much of it as fits. */
function spanLabel(s, i, width) {
  const c = s.code[i];
  if (c >= WAIT && c < SEND) return width > 52 ? HEAD.styles[c].label : "";
  if (c >= SEND) return width > 34 ? `p${s.pipeline[i]}·${s.mb[i]}` : String(s.mb[i]);
  return width > 30 || c >= 5 ? `${HEAD.kinds[c]}${c >= 5 && c <= 7 ? "" : s.mb[i]}` : String(s.mb[i]);
}
