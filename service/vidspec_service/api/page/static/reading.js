// One answer while it arrives: its tokens and who wrote them, what the draft sees, when each worker runs, the times.

import { ask } from "./api.js";
import { uploadAgain } from "./clips.js";

const INCLUDE = ["token_details", "draft_view", "timeline"];

export function unread() {
  return { text: "", thinks: false, tokens: [], spans: [], view: null, facts: null, finish: null, error: null,
    began: performance.now(), first: null, last: null };
}

// Reads the answer to `body` into `answer`, calling `changed` after each event; stores any failure in `error`.
export async function read(body, answer, changed, signal) {
  try {
    for await (const event of events({ ...body, include: INCLUDE }, signal)) {
      take(event, answer);
      changed();
    }
    if (!answer.facts) throw new Error("The answer ended before it was complete.");
  } catch (error) {
    answer.error = error.name === "AbortError" ? "Stopped." : error.message;
  }
  trim(answer);
  changed();
}

// Asks once more if the server has forgotten the videos: it was started again, or kept them for its hour.
async function* events(request, signal) {
  try {
    yield* ask(request, signal);
  } catch (error) {
    if (error.status !== 404 || !(await uploadAgain(signal))) throw error;
    yield* ask(request, signal);
  }
}

function take(event, answer) {
  const [choice] = event.choices;
  if (event.draft_view) answer.view = event.draft_view;
  if (event.timeline) answer.spans.push(...event.timeline);
  if (event.usage) answer.facts = event;
  if (!choice) return;
  answer.text += choice.delta.content ?? "";
  answer.thinks ||= Boolean(choice.delta.reasoning);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (!choice.token_details?.length) return;
  answer.last = performance.now();
  answer.first ??= answer.last;
  choice.token_details.forEach((token, place) => {
    answer.tokens.push({ ...token, thought: answer.thinks && !answer.text, logprob: choice.logprobs?.content[place] });
  });
}

// The answer's text excludes the stop string and what the model thought before, but its tokens include both.
function trim(answer) {
  let length = 0;
  if (!answer.finish) return;
  const written = answer.tokens.map((token) => token.text).join("");
  const thought = answer.thinks ? /^[^]*?(<\/think>\n*|$)/.exec(written)[0].length : 0;
  for (const token of answer.tokens) {
    token.text = token.text.slice(0, Math.max(0, thought + answer.text.length - length));
    length += token.text.length;
  }
}

// The acceptance rate of verified draft tokens: exact at the end; until then a lower bound, since the target follows
// each rejected token with one of its own.
function acceptance(accepted, own, facts) {
  if (!facts) return { acceptance: accepted ? accepted / (accepted + own) : null, isLeast: true };
  const { accepted_prediction_tokens: kept, rejected_prediction_tokens: refused } = facts.usage.completion_tokens_details;
  return { acceptance: kept + refused ? facts.speculation.acceptance_rate : null, isLeast: false };
}

export function figures(answer) {
  const { tokens, spans, facts } = answer;
  const count = (source) => tokens.filter((token) => token.source === source).length;
  const verifications = spans.filter((span) => span.phase === "verify").length;
  const since = answer.first === null ? 0 : (answer.last - answer.first) / 1000;
  return {
    draft: count("draft"),
    target: count("target"),
    grammar: count("grammar"),
    rate: facts?.timings.time_per_output_token_s > 0 ? 1 / facts.timings.time_per_output_token_s
      : since > 0 ? (tokens.length - 1) / since : null,
    firstToken: facts?.timings.time_to_first_token_s ?? (answer.first === null ? null : (answer.first - answer.began) / 1000),
    ...acceptance(count("draft"), count("target"), facts),
    accepted: facts?.speculation.mean_accepted_tokens ?? (verifications ? count("draft") / verifications : null),
    mode: facts?.speculation.mode ?? null,
    cached: facts?.usage.prompt_tokens_details.cached_tokens ?? null,
    prompt: facts?.usage.prompt_tokens ?? null,
  };
}
