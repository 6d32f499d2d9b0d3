// Pictures of a clip at given times, drawn in the browser: the server is not asked for what is here already.

const WIDTH = 128;
const LARGEST = 1024;

function sized(width, height, most) {
  const scale = Math.min(1, most / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  return canvas;
}

async function loaded(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

// The image as base64 of a JPEG, as /v1/video-chat takes a frame.
export async function jpegOf(url) {
  const image = await loaded(url);
  const canvas = sized(image.naturalWidth, image.naturalHeight, LARGEST);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92).split(",")[1];
}

// One canvas for each time, in order, as they are found; an empty one where the browser cannot show the clip.
export async function* pictures(clip, times) {
  if (clip.isImage) {
    const image = await loaded(clip.url);
    const canvas = sized(image.naturalWidth, image.naturalHeight, WIDTH);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    yield canvas;
    return;
  }
  const video = document.createElement("video");
  Object.assign(video, { src: clip.url, muted: true, playsInline: true, preload: "auto" });
  const heard = (name) => new Promise((resolve) => {
    video.addEventListener(name, () => resolve(true), { once: true });
    video.addEventListener("error", () => resolve(false), { once: true });
  });
  const isShown = clip.url !== "" && (await heard("loadeddata"));
  for (const time of times) {
    if (!isShown) {
      yield sized(clip.width ?? 16, clip.height ?? 9, WIDTH);
      continue;
    }
    const sought = heard("seeked");
    video.currentTime = time + 1e-3; // the frame that begins there, not the one before
    await sought;
    const canvas = sized(video.videoWidth, video.videoHeight, WIDTH);
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    yield canvas;
  }
  video.removeAttribute("src");
  video.load();
}
