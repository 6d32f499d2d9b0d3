// Server-sent events of a body that is being read, as objects; comments and the last word are left out.

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
