// A clip from the camera, as the browser encodes it.

import { byId } from "./dom.js";

const LONGEST_MS = 30000;

// Resolves to a file, or to nothing.
export async function record() {
  const dialog = byId("record-dialog");
  const state = byId("record-state");
  const go = byId("record-go");
  const camera = byId("camera");
  let stream = null;
  let recorder = null;
  const parts = [];
  go.textContent = "Start";
  go.disabled = true;
  state.textContent = "The camera starts.";
  dialog.showModal();
  const closed = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  byId("record-cancel").onclick = () => { parts.length = 0; recorder = null; dialog.close(); };
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: true });
    camera.srcObject = stream;
    await camera.play();
    state.textContent = "Ready, for 30 seconds at most.";
    go.disabled = false;
    go.onclick = () => {
      if (recorder) return recorder.stop();
      recorder = new MediaRecorder(stream);
      recorder.ondataavailable = (event) => parts.push(event.data);
      recorder.onstop = () => dialog.close();
      recorder.start();
      setTimeout(() => recorder?.state === "recording" && recorder.stop(), LONGEST_MS);
      state.textContent = "Recording.";
      go.textContent = "Stop";
    };
  } catch {
    state.textContent = "There is no camera, or it may not be used here.";
  }
  await closed;
  stream?.getTracks().forEach((track) => track.stop());
  camera.srcObject = null;
  return recorder && parts.length ? new File(parts, "recording.webm", { type: parts[0].type }) : null;
}
