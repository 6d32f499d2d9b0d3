// An answer to take away: as JSON, and the request as commands that anybody can run.

import { el } from "./dom.js";

const server = () => new URL(".", document.baseURI).href.replace(/\/$/, "");
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const asField = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

function fieldsOf(turn) {
  const { videos, messages, ...fields } = turn.body;
  return { videos: videos ?? [], messages, fields };
}

// A form: a video that is at hand is sent with it.
export function curlOf(turn) {
  const { videos, messages, fields } = fieldsOf(turn);
  const parts = [
    ...videos.map((video, place) => (video.video_id ? `-F video=@${quoted(turn.names[place])}`
      : `-F video=@${quoted(`${turn.names[place]}.mp4`)}`)),
    messages.length === 1 ? `-F prompt=${quoted(messages[0].content)}` : `-F messages=${quoted(JSON.stringify(messages))}`,
    ...Object.entries(fields).map(([name, value]) => `-F ${name}=${quoted(asField(value))}`),
  ];
  return `curl ${quoted(`${server()}/v1/video-chat`)} \\\n  ${parts.join(" \\\n  ")}\n`;
}

export function pythonOf(turn) {
  const { messages, fields } = fieldsOf(turn);
  const body = JSON.stringify({ messages, ...fields }, null, 4);
  return `import json
import httpx

server = ${JSON.stringify(server())}
videos = []
for name in ${JSON.stringify(turn.names)}:
    with open(name, "rb") as file:
        kept = httpx.post(f"{server}/v1/videos", files={"video": file}, timeout=120).raise_for_status().json()
    videos.append({"video_id": kept["id"]})
body = json.loads(r'''${body.replaceAll("'''", `'''"'''"r'''`)}''')
answer = httpx.post(f"{server}/v1/video-chat", json={**body, "videos": videos}, timeout=120).raise_for_status().json()
print(answer["choices"][0]["message"]["content"])
`;
}

export function download(turn) {
  const { text, tokens, spans, view, facts, error } = turn.answer;
  const kept = { request: turn.body, clips: turn.names, text, tokens, timeline: spans, draft_view: view, error, ...facts };
  const url = URL.createObjectURL(new Blob([JSON.stringify(kept, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: "vidspec-answer.json" }).click();
  URL.revokeObjectURL(url);
}
