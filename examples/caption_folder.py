"""Caption every clip of a folder as JSON: one file for each clip, valid by a schema that you choose.

    python examples/caption_folder.py clips/ captions/
    python examples/caption_folder.py clips/ captions/ --schema mine.json --prompt 'List the people.'

`vidspec batch` sends the requests: to a server that it starts, unless --url or --ray-address names another. After an
interruption, run the same command again to continue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[1] / "docs/description.schema.json"  # the format that the bundled pair was trained on


def main() -> int:
    """Returns exit code 1 if some clips have no caption; stderr names them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path, help="folder of clips")
    parser.add_argument("captions", type=Path, help="folder that receives CLIP.json for every CLIP")
    parser.add_argument("--schema", type=Path, default=SCHEMA, help="JSON schema of a caption")
    parser.add_argument("--prompt", default="Describe the video as JSON.")
    args, more = parser.parse_known_args()

    args.captions.mkdir(parents=True, exist_ok=True)
    answers = args.captions / "answers.jsonl"
    schema = {"name": "caption", "schema": json.loads(args.schema.read_text())}
    body = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 1000}
    command = [sys.executable, "-m", "vidspec_service", "batch", str(args.clips), f"--output={answers}"]
    done = subprocess.run([*command, f"--prompt={args.prompt}", f"--body={json.dumps(body)}", *more], check=False)
    if not answers.exists():
        return done.returncode
    failed = [clip for clip in map(json.loads, answers.read_text().splitlines()) if not write_caption(clip, args)]
    for clip in failed:
        print(f"{clip['custom_id']}: {clip['error'] or clip['response']['body']}", file=sys.stderr)
    return 1 if failed or done.returncode else 0


def write_caption(answer: dict[str, Any], args: argparse.Namespace) -> bool:
    """Writes CLIP.json if the answer is complete: one that `max_tokens` cut off is not valid JSON."""
    choice = ((answer["response"] or {}).get("body", {}).get("choices") or [{}])[0]
    if choice.get("finish_reason") != "stop":
        return False
    caption = json.loads(choice["message"]["content"])
    clip = Path(answer["custom_id"]).relative_to(args.clips)
    path = args.captions / clip.with_name(f"{clip.name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(caption, indent=2, ensure_ascii=False) + "\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
