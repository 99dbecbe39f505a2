// The text of the page: table, caption, legend, tooltip. All of it is set through textContent, so that a name cannot
// inject HTML.

function make(tag, className, text, parent) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const colorOf = code => document.documentElement.dataset.theme === "dark" ? HEAD.styles[code].dark : HEAD.styles[code].light;

function fillHeader(schedules) {
  document.getElementById("title").textContent = HEAD.title;
  const sources = document.getElementById("sources");
  sources.replaceChildren();
  for (const source of new Set(schedules.map(s => s.source))) make("span", "badge " + source, source, sources);
  const notes = document.getElementById("notes");
  notes.replaceChildren();
  if (HEAD.verdict) make("p", "verdict", HEAD.verdict, notes);
  for (const note of HEAD.notes) make("p", "", note, notes);
  fillTable(schedules);
  fillCaption();
  fillLegend(schedules);
}

function fillTable(schedules) {
  const table = document.getElementById("table");
  table.replaceChildren();
  const head = make("tr", "", null, make("thead", "", null, table));
  const several = schedules.length > 1, mixed = new Set(schedules.map(s => s.source)).size > 1;
  for (const [name, numeric] of [["schedule", 0], ...(mixed ? [["", 0]] : []), ["iteration", 1], ...(several ? [["speed-up", 1]] : []),
    ["accelerators busy", 1], ["time of all workers", 0], ["in flight", 1], ["busiest WAN link", 1], ["critical path: compute / WAN", 1]])
    make("th", numeric ? "n" : "", name, head);
  const body = make("tbody", "", null, table), slowest = Math.max(...schedules.map(s => s.figures.iteration_s));
  for (const s of schedules) {
    const row = make("tr", "", null, body), f = s.figures;
    make("td", "name", s.name + (s.tcp ? ` · ${s.tcp} TCP` : ""), row);
    if (mixed) make("span", "badge " + s.source, s.source, make("td", "", null, row));
    make("td", "n", duration(f.iteration_s * 1e9), row);
    if (several) make("td", "n", (slowest / f.iteration_s).toFixed(2) + "×", row);
    make("td", "n", percent(f.utilization), row);
    const all = f.num_workers * s.makespan / 1e9;
    fillSplit(make("div", "split", null, make("td", "", null, row)), f.utilization, c => (f.bubbles_s[CAUSE[c]] || 0) / all);
    make("td", "n", String(f.peak_in_flight), row);
    const links = Object.values(f.links);
    make("td", "n", links.length ? percent(Math.max(...links)) : "–", row);
    const path = f.critical_path_s;
    make("td", "n", `${duration(path.compute * 1e9)} / ${duration((path.wire + path.queue + path.latency) * 1e9)}`, row);
  }
}

/** Shares of time as a bar: computing, then each cause of waiting. */
function fillSplit(bar, busy, shareOf) {
  const part = (share, color, text, wait) => {
    if (share <= 0) return;
    const piece = make("i", wait ? "chip wait" : "", null, bar);
    piece.style.cssText = `width:${100 * share}%;background-color:${color};border-radius:0`;
    piece.title = `${text}: ${percent(share)}`;
  };
  part(busy, colorOf(0), "computing");
  CAUSE_ORDER.forEach(c => part(shareOf(c), colorOf(WAIT + c), "waiting, " + HEAD.styles[WAIT + c].label, true));
  return bar;
}

function fillCaption() {
  const caption = document.getElementById("caption");
  caption.replaceChildren();
  const say = (text, bold) => caption.append(bold ? make("b", "", text) : text);
  say("Each row is a worker: one accelerator (or a tensor-parallel group) that holds one stage of the model. Solid boxes are work: ");
  say("F", 1); say(" forward, "); say("B", 1); say(" backward (or its halves "); say("I", 1); say(" and "); say("W", 1);
  say("); the number is the microbatch. Hatched spans are bubbles: the worker waits, and the colour says why. Rows between two datacenters are the WAN links that join them. " + (HEAD.schedules.some(s => s.groups.some(g => g.name.startsWith("rails of "))) ? "Rows under rails are optical circuits of a datacenter, between two stages (hop) or for gradient sums (ring): nothing can be sent on one while it is changed. " : "") + "Point at a box to highlight its microbatch on all workers.");
}

function fillLegend(schedules) {
  const legend = document.getElementById("legend"), used = new Set();
  legend.replaceChildren();
  for (const s of schedules) for (const c of s.code) used.add(c);
  for (let code = 0; code < NUM_CODES; code++) {
    if (!used.has(code)) continue;
    const item = make("span", "", null, legend), wait = code >= WAIT && code < SEND;
    make("i", wait ? "chip wait" : "chip", null, item).style.backgroundColor = colorOf(code);
    item.append((wait ? "waiting: " : "") + HEAD.styles[code].label);
    item.title = HEAD.styles[code].meaning;
  }
}

function tipForSpan(tip, s, row, i) {
  const group = s.rowGroup[row], c = s.code[i], wait = c >= WAIT && c < SEND;
  make("h2", "", spanName(s, i), tip);
  make("p", "", HEAD.styles[c].meaning, tip);
  const place = group.links ? `${s.rowName[row] || "same link"} · ${group.name}` : `${s.rowName[row]} in ${group.name}`;
  make("p", "", `${place} · ${s.name} (${s.source})`, tip);
  const list = make("dl", "", null, tip);
  const pair = (name, value) => { make("dt", "", name, list); make("dd", "", value, list); };
  if (wait) {
    let next = i + 1;
    while (next < s.ptr[row + 1] && s.code[next] >= WAIT) next++;
    if (next < s.ptr[row + 1]) pair("next op", spanName(s, next));
  } else if (c >= SEND || c < 5) {
    pair("microbatch", String(s.mb[i]));
    pair("pipeline", String(s.pipeline[i]));
  }
  pair("from", duration(s.start[i]));
  pair("to", duration(s.end[i]));
  pair(c >= SEND ? "on the wire" : wait ? "waits" : "takes", duration(s.end[i] - s.start[i]));
  if (c >= SEND) { pair("queued before", duration(s.queued[i])); pair("latency after", duration(s.latency[i])); }
}

function tipForShares(tip, s, group, shares, t) {
  make("h2", "", `${group.name} at ${duration(t)}`, tip);
  make("p", "", `${group.last - group.first} ${group.what} · ${s.name} (${s.source})`, tip);
  const list = make("dl", "", null, tip);
  let rest = 1;
  for (const c of STACK_ORDER) if (shares[c] > 0.0005) {
    rest -= shares[c];
    make("dt", "", (c >= WAIT && c < SEND ? "waiting: " : "") + HEAD.styles[c].label, list);
    make("dd", "", percent(shares[c]), list);
  }
  if (rest > 0.005) { make("dt", "", group.links ? "idle" : "after the end", list); make("dd", "", percent(rest), list); }
}
