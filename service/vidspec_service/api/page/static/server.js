// The server's figures from /metrics, updated while the panel is open and the page is visible.

import { metrics } from "./api.js";
import { byId, el, percent, show } from "./dom.js";

const PERIOD_MS = 2000;
const TOLD = [
  ["running", "running", (now) => now("num_requests_running")],
  ["waiting", "waiting", (now) => now("num_requests_waiting")],
  ["rate", "tokens/s", (now, rate) => rate("generation_tokens_total")?.toFixed(0)],
  ["acceptance", "draft tokens accepted", (now, rate, change) => {
    const judged = change("spec_decode_num_draft_tokens_total");
    return judged ? percent(change("spec_decode_num_accepted_tokens_total") / judged) : undefined;
  }],
  ["cache", "KV cache used, target", (now) => percent(now("kv_cache_usage_perc", 'role="target"') ?? 0)],
  ["prefix", "prompt tokens cached", (now) => percent((now("prefix_cache_hits_total") ?? 0) / (now("prefix_cache_queries_total") || 1))],
  ["target", "target", (now) => worker(now, "target")],
  ["draft", "draft", (now) => worker(now, "draft")],
  ["videos", "videos kept", (now) => now("stored_videos")],
];

function worker(now, role) {
  const label = `role="${role}"`;
  const isReady = now("worker_ready", label);
  if (isReady === undefined) return "none";
  if (!isReady) return "not ready";
  const restarts = now("worker_restarts_total", label);
  return `${percent(1 - (now("worker_idle_ratio", label) ?? 1))} busy${restarts ? `, restarted ${restarts}×` : ""}`;
}

// The samples of a metrics page in the text format: name and labels, value.
function parse(page) {
  return page.split("\n").filter((line) => line.startsWith("vidspec:")).map((line) => {
    const space = line.lastIndexOf(" ");
    return [line.slice("vidspec:".length, space), Number(line.slice(space + 1))];
  });
}

const lookUp = (samples, name, label = "") =>
  samples?.find(([sample]) => (sample === name || sample.startsWith(`${name}{`)) && sample.includes(label))?.[1];

export function start() {
  const button = byId("server");
  const panel = byId("server-panel");
  const values = new Map(TOLD.map(([name]) => [name, el("dd", {}, "–")]));
  const problem = el("p", { class: "problem", hidden: true });
  panel.append(el("dl", { class: "figures" },
    ...TOLD.map(([name, label]) => el("div", {}, el("dt", {}, label), values.get(name)))), problem);
  let before = null;
  let timer = null;

  async function look() {
    if (document.hidden) return;
    try {
      const samples = parse(await metrics());
      const at = performance.now();
      const change = (name) => (before ? lookUp(samples, name) - (lookUp(before.samples, name) ?? 0) : undefined);
      const rate = (name) => (before ? (change(name) / (at - before.at)) * 1000 : undefined);
      for (const [name, , find] of TOLD) {
        const found = find((...which) => lookUp(samples, ...which), rate, change);
        if (found !== undefined) values.get(name).textContent = found;
      }
      before = { samples, at };
      show(problem, "");
    } catch (error) {
      before = null; // a server that was started again counts from zero
      if (error.status === 401) clearInterval(timer); // the user has given no key: do not ask again every time
      show(problem, error.status === 404 ? "This server does not serve /metrics." : error.message);
    }
  }

  button.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    clearInterval(timer);
    if (panel.hidden) return;
    look();
    timer = setInterval(look, PERIOD_MS);
  });
}
