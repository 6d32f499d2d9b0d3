// The server's routes: each call sends the API key, asks the user for one on 401, turns refusals into readable errors.

import { askForKey, authorization } from "./key.js";

const UNREACHABLE = "The server cannot be reached.";
const READY_MS = 10_000;
const LOST = "The connection to the server was lost.";
const urlOf = (path) => new URL(path, document.baseURI); // relative: the page may lie behind a path

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message || `The server answered ${status}.`);
    this.status = status;
  }
}

// Browsers word the failures of the network each in their own way.
const saying = (message) => (error) => { throw error.name === "AbortError" ? error : new Error(message); };

async function call(path, options = {}) {
  let response;
  do {
    response = await fetch(urlOf(path), { ...options, headers: { ...options.headers, ...authorization() } })
      .catch(saying(UNREACHABLE));
  } while (response.status === 401 && (await askForKey()));
  if (!response.ok) {
    throw new Refused(response.status, await response.json().catch(() => null)); // a proxy's answer may be any
  }
  return response;
}

export const models = async () => (await (await call("v1/models")).json()).data;
export const isReady = async () =>
  (await fetch(urlOf("health/ready"), { signal: AbortSignal.timeout(READY_MS) }).catch(saying(UNREACHABLE))).ok;
export const metrics = async () => (await call("metrics")).text();

export async function sampleClip(seed) {
  const response = await call(`page/samples/${seed}`);
  return { blob: await response.blob(), caption: response.headers.get("x-caption") };
}

// Uploads a file for the server to keep and reports progress from 0 to 1, which fetch cannot do.
export async function upload(file, onProgress, signal) {
  let answer;
  do {
    answer = await send(file, onProgress, signal);
  } while (answer.status === 401 && (await askForKey()));
  if (answer.status !== 200) throw new Refused(answer.status, answer.body);
  return answer.body;
}

function send(file, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", urlOf("v1/videos"));
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onload = () => resolve({ status: request.status, body: request.response });
    request.onerror = () => reject(new Error(UNREACHABLE));
    request.onabort = () => reject(new DOMException("aborted", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    const form = new FormData();
    form.append("video", file);
    request.send(form);
  });
}

// The events of an answer as they arrive; throws an error that is sent in the stream.
export async function* ask(body, signal) {
  const response = await call("v1/video-chat", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(saying(LOST));
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // an SSE comment
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Refused(500, event);
      yield event;
    }
  }
}
