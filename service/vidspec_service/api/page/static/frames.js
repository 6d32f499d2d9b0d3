// Pictures of a clip at given times, drawn in the browser, which has the clip: the server is not asked.

const WIDTH = 128;
const LARGEST = 1024;

// A canvas with the given aspect ratio and no side longer than `most`; shows the picture if there is one.
function drawn(picture, width, height, most) {
  const scale = Math.min(1, most / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  if (!picture) return canvas;
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent: a JPEG would be black there, like the writing of many figures
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}

async function loaded(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

// The image as a base64 JPEG, the format in which /v1/video-chat accepts a frame.
export async function jpegOf(url) {
  const image = await loaded(url);
  const canvas = drawn(image, image.naturalWidth, image.naturalHeight, LARGEST);
  return canvas.toDataURL("image/jpeg", 0.92).split(",")[1];
}

// Yields one canvas per time, in order; an empty one where the browser cannot show the clip.
export async function* pictures(clip, times) {
  if (clip.isImage) {
    const image = await loaded(clip.url);
    yield drawn(image, image.naturalWidth, image.naturalHeight, WIDTH);
    return;
  }
  const video = document.createElement("video");
  Object.assign(video, { src: clip.url, muted: true, playsInline: true, preload: "auto" });
  const heard = (name) => new Promise((resolve) => {
    video.addEventListener(name, () => resolve(true), { once: true });
    video.addEventListener("error", () => resolve(false), { once: true });
  });
  const isShown = clip.url !== "" && (await heard("loadeddata")) && video.videoWidth > 0;
  for (const time of times) {
    if (!isShown) {
      yield drawn(null, clip.width ?? 16, clip.height ?? 9, WIDTH);
      continue;
    }
    const sought = heard("seeked");
    video.currentTime = time + 1e-3; // seek to the frame that begins there, not the one before
    await sought;
    yield drawn(video, video.videoWidth, video.videoHeight, WIDTH);
  }
  video.removeAttribute("src");
  video.load();
}
