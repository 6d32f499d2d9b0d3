// Exports an answer as JSON, and its request as commands that anybody can run.

import { el } from "./dom.js";
import { authorization } from "./key.js";

const server = () => new URL(".", document.baseURI).href.replace(/\/$/, "");
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const asFile = (name) => quoted(`video=@"${name.replaceAll(/["\\]/g, "\\$&")}"`); // else curl splits it at a comma or semicolon
const asField = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

const needsKey = () => "authorization" in authorization(); // the key itself stays in the tab

// A form with the files of the request. Its texts use --form-string, since -F ends a text at a semicolon. Images are
// sent as JSON, since the form has no field for them. An API key is read from the variable KEY.
export function curlOf(turn) {
  const { videos = [], messages, ...fields } = turn.body;
  const url = quoted(`${server()}/v1/video-chat`) + (needsKey() ? ' -H "Authorization: Bearer $KEY"' : "");
  if (videos.some((video) => video.video)) {
    return `curl ${url} -H 'Content-Type: application/json' -d @- <<'END'\n${JSON.stringify(turn.body)}\nEND\n`;
  }
  const asked = messages.length === 1 ? { prompt: messages[0].content } : { messages };
  const parts = [
    ...turn.names.map((name) => `-F ${asFile(name)}`),
    ...Object.entries({ ...asked, ...fields }).map(([name, value]) => `--form-string ${name}=${quoted(asField(value))}`),
  ];
  return `curl ${url} \\\n  ${parts.join(" \\\n  ")}\n`;
}

export function pythonOf(turn) {
  const { videos = [], ...fields } = turn.body;
  const shown = videos.map((video, place) => (video.video ? JSON.stringify(video) : `kept(${JSON.stringify(turn.names[place])})`));
  return `import json
${needsKey() ? "import os\n" : ""}import httpx

client = httpx.Client(base_url=${JSON.stringify(server())}, timeout=120)
${needsKey() ? 'client.headers["Authorization"] = "Bearer " + os.environ["KEY"]\n' : ""}

def kept(name):
    with open(name, "rb") as file:
        answer = client.post("/v1/videos", files={"video": file}).raise_for_status()
    return {"video_id": answer.json()["id"]}


body = json.loads(${JSON.stringify(JSON.stringify(fields))})
body["videos"] = [${shown.join(", ")}]
answer = client.post("/v1/video-chat", json=body).raise_for_status().json()
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
