// The server reads the clips while the user still types, so that only the question itself is left to be read.

import { ask } from "./api.js";
import * as clips from "./clips.js";
import { byId } from "./dom.js";
import { fields } from "./settings.js";

const ANY_QUESTION = [{ role: "user", content: "?" }];
let last = "";
let isReading = false;

export function start() {
  for (const kind of ["focus", "input"]) byId("prompt").addEventListener(kind, begin);
}

async function begin() {
  if (isReading) return;
  isReading = true;
  // Whatever is wrong with the clips or the settings, the answer to the question itself says so.
  await readAhead().catch(() => {});
  isReading = false;
}

async function readAhead() {
  const { signal } = new AbortController(); // never aborted: what has been read serves later questions, too
  const { videos } = await clips.sources(signal);
  const body = { ...fields(), messages: ANY_QUESTION, videos, max_tokens: 1, seed: 0, response_format: undefined };
  if (!videos.length || JSON.stringify(body) === last) return;
  last = JSON.stringify(body);
  for await (const _ of ask(body, signal)); // up to its end
}
