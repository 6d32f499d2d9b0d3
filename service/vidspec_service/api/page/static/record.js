// Records a clip from the camera, encoded by the browser.

import { byId } from "./dom.js";

const LONGEST_MS = 30000;
const PART_MS = 200;

// Resolves to a file, or to nothing if the user cancels.
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
  state.textContent = "Starting the camera.";
  dialog.showModal();
  const closed = new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  dialog.oncancel = () => { recorder = null; }; // Escape
  byId("record-cancel").onclick = () => { recorder = null; dialog.close(); };
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: true });
    camera.srcObject = stream;
    await camera.play();
    state.textContent = "Ready to record, for 30 seconds at most.";
    go.disabled = false;
    go.onclick = () => {
      if (recorder) return recorder.stop();
      recorder = new MediaRecorder(stream);
      recorder.ondataavailable = (event) => {
        if (!event.data.size) return; // the camera has delivered no picture yet
        parts.push(event.data);
        state.textContent = "Recording.";
        go.disabled = false;
      };
      recorder.onstop = () => recorder && dialog.close();
      recorder.start(PART_MS);
      setTimeout(() => recorder?.state === "recording" && recorder.stop(), LONGEST_MS);
      go.textContent = "Stop";
      go.disabled = true;
    };
  } catch {
    state.textContent = "There is no camera, or this page may not use it.";
  }
  await closed;
  stream?.getTracks().forEach((track) => track.stop());
  camera.srcObject = null;
  return recorder && parts.length ? new File(parts, "recording.webm", { type: parts[0].type }) : null;
}
