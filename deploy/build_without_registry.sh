#!/usr/bin/env bash
# Builds an image and tries it under docker-compose.yml, on any Debian-like machine and without a container registry:
# engine and base image come from Debian's packages (debootstrap), Python's packages from wherever pip gets them here.
#
#   sudo deploy/build_without_registry.sh [cpu|cuda|build-cuda]
#
# cpu (the default) and cuda build the image and then, under the Compose policy: start it until it is ready, ask about
# a rendered clip, cost its health probe, start it again, kill it with -9, stop it while it answers, and change a line
# of source. build-cuda only builds: no GPU is needed. Figures go to stdout, a failure ends it with another code than 0.
#
# Needs: root, debootstrap, curl, and with cuda the NVIDIA container toolkit in the engine's place.
# WORK     everything made here; removed at the end but for what KEEP=1 keeps    [/var/tmp/vidspec-images]
# PIP_CONF pip's settings for the build, given as a secret                       [of `pip config`]
# TORCH_CPU_INDEX  where torch without CUDA is; empty: the usual index           [empty]
set -euo pipefail

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VARIANT=${1:-cpu}
WORK=${WORK:-/var/tmp/vidspec-images}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-}
ENGINE=$WORK/engine
URL=http://127.0.0.1:8000
SOCKET=unix:///run/vidspec-docker.sock

case $VARIANT in
    cpu) SERVICE=cpu ;;
    cuda | build-cuda) SERVICE=vidspec ;;
    *) echo "usage: $0 [cpu|cuda|build-cuda]" >&2 && exit 2 ;;
esac

# In a mount namespace of its own, whose mounts vanish with the last process in it.
if [ -z "${IN_NAMESPACE:-}" ]; then
    IN_NAMESPACE=1 exec unshare --mount --propagation private "$0" "$@"
fi

said() { printf '%-48s %s\n' "$1" "$2"; }
fail() { echo "FAILED: $*" >&2 && exit 1; }
seconds_since() { awk -v from="$1" -v to="$(date +%s.%N)" 'BEGIN { printf "%.1f", to - from }'; }
docker() { chroot "$ENGINE" docker --host "$SOCKET" "$@"; }
compose() { docker compose --project-directory /repository -f /repository/docker-compose.yml -f /work/override.yml "$@"; }
inspect() { docker inspect -f "$1" "$(compose ps --all --quiet "$SERVICE")"; }

make_roots() {
    mkdir -p "$WORK"
    [ -e "$ENGINE/usr/sbin/dockerd" ] || debootstrap --variant=minbase \
        --include=docker.io,docker-cli,docker-buildx,docker-compose,iptables,ca-certificates trixie "$ENGINE" > "$WORK/engine.log"
    [ -e "$WORK/base/usr/bin/python3" ] || debootstrap --variant=minbase \
        --include=python3-venv,ca-certificates bookworm "$WORK/base" > "$WORK/base.log"
    ln -sf python3 "$WORK/base/usr/bin/python"
    rm -rf "$WORK/base/var/cache/apt/archives" "$WORK/base/var/lib/apt/lists"
    # Certificates that this machine trusts, apt's settings and the resolver are those of the machine.
    cp /etc/ssl/certs/ca-certificates.crt "$WORK/base/etc/ssl/certs/"
    cp --dereference /etc/resolv.conf "$ENGINE/etc/resolv.conf"
}

start_engine() {
    mkdir -p "$WORK/docker" "$ENGINE/var/lib/docker" "$ENGINE/repository" "$ENGINE/work"
    mount --bind "$ENGINE" "$ENGINE"  # runc pivots its root, which must be a mount
    for place in proc sys dev; do mount --rbind "/$place" "$ENGINE/$place"; done
    mount --bind "$WORK/docker" "$ENGINE/var/lib/docker"
    mount --bind "$REPOSITORY" "$ENGINE/repository"
    mount --bind "$WORK" "$ENGINE/work"
    chroot "$ENGINE" dockerd --host "$SOCKET" --exec-root /run/vidspec-docker --pidfile /run/vidspec-docker.pid \
        > "$WORK/dockerd.log" 2>&1 &
    DOCKERD=$!
    trap clean_up EXIT
    for _ in $(seq 120); do docker version > /dev/null 2>&1 && return; sleep 0.5; done
    fail "dockerd did not come up: $WORK/dockerd.log"
}

clean_up() {
    compose --profile cpu down --volumes --timeout 5 > /dev/null 2>&1 || true
    kill "$DOCKERD" && wait "$DOCKERD" || true
    if [ -z "${KEEP:-}" ]; then
        umount -R "$ENGINE/var/lib/docker" "$ENGINE/repository" "$ENGINE/work" "$ENGINE"/{proc,sys,dev} && rm -rf --one-file-system "$WORK"
    fi
}

# What differs from docker-compose.yml: the base, where pip looks, and what the tests below need. All policy stays.
write_override() {
    if [ -n "${PIP_CONF:-}" ]; then
        cp "$PIP_CONF" "$WORK/pip.conf"
    else  # of `pip config` what is about indexes; folders of this machine are not in the image
        { echo "[global]" && python3 -m pip config list 2> /dev/null \
            | sed -nE "s/^(global|user|:env:)\.((extra-)?index-url|trusted-host|timeout)='(.*)'$/\2 = \4/p" | grep -v file: || true; \
          echo "cert = /etc/ssl/certs/ca-certificates.crt"; } > "$WORK/pip.conf"
    fi
    cat > "$WORK/override.yml" <<YAML
secrets:
  pip.conf:
    file: /work/pip.conf
services:
  $SERVICE:
    build:
      context: ${CONTEXT:-/repository}
      network: host
      args: {BASE: "vidspec-base", TORCH_CPU_INDEX: "$TORCH_CPU_INDEX"}
      secrets: [pip.conf]
YAML
}

wait_until_ready() {  # prints seconds since $1
    for _ in $(seq 3000); do
        [ "$(curl -s -o /dev/null -w '%{http_code}' "$URL/health/ready")" = 200 ] && seconds_since "$1" && return
        sleep 0.1
    done
    compose logs --tail 20 "$SERVICE" >&2
    fail "not ready after 300 s"
}

ask() {  # $1: tokens; prints the answer
    curl -sS --fail-with-body -F "video=@$WORK/clip.mp4" -F prompt='Describe the video.' -F max_tokens="$1" "$URL/v1/video-chat"
}

make_roots
start_engine
docker image inspect vidspec-base > /dev/null 2>&1 || tar -C "$WORK/base" -c . | docker import - vidspec-base > /dev/null
write_override

from=$(date +%s.%N)
compose --progress plain build "$SERVICE" > "$WORK/build.log" 2>&1 || { tail -30 "$WORK/build.log" >&2; fail "build: $WORK/build.log"; }
IMAGE=$(compose config --images "$SERVICE" | head -1)
said "build, seconds" "$(seconds_since "$from")"
said "image, bytes" "$(docker image inspect -f '{{.Size}}' "$IMAGE")"
[ "$VARIANT" = build-cuda ] || {
    # `up` as a user types it: it builds by itself, from the cache here, and pulls nothing.
    from=$(date +%s.%N)
    compose up --detach "$SERVICE" 2> "$WORK/up.log" || { cat "$WORK/up.log" >&2; fail "up"; }
    said "up to ready, first start, seconds" "$(wait_until_ready "$from")"

    compose exec -T "$SERVICE" sh -c 'vidspec render-clip --seed 7 /tmp/clip.mp4 >&2 && cat /tmp/clip.mp4' > "$WORK/clip.mp4" 2> "$WORK/truth.txt"
    said "the clip shows" "$(tr '\n' ' ' < "$WORK/truth.txt")"
    said "the answer" "$(ask 64 | python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])')"

    probe=$(docker image inspect -f '{{index .Config.Healthcheck.Test 3}}' "$IMAGE")
    said "probe, CPU seconds of 100" "$(compose exec -T -e PROBE="$probe" "$SERVICE" \
        bash -c 'TIMEFORMAT="%U + %S"; time for _ in {1..100}; do bash -c "$PROBE" || exit 1; done' 2>&1)"
    compose exec -T -e VIDSPEC_PORT=9 "$SERVICE" bash -c "$probe" 2> /dev/null && fail "the probe is green where nothing listens"

    from=$(date +%s.%N)
    compose restart "$SERVICE" 2> /dev/null
    said "stop and start to ready, warm cache, seconds" "$(wait_until_ready "$from")"

    # The server itself is killed, not the container: init ends with it, and the restart policy starts it again.
    server=$(pgrep -P "$(inspect '{{.State.Pid}}')")
    from=$(date +%s.%N)
    kill -9 "$server"
    while [ "$(curl -s -o /dev/null -w '%{http_code}' "$URL/health/live")" = 200 ]; do sleep 0.05; done
    said "kill -9 to ready, seconds" "$(wait_until_ready "$from")"
    said "restarts" "$(inspect '{{.RestartCount}}')"
    for _ in $(seq 60); do [ "$(inspect '{{.State.Health.Status}}')" = healthy ] && break; sleep 1; done
    said "health as Docker sees it" "$(inspect '{{.State.Health.Status}}')"

    # Twelve answers under way when SIGTERM comes; each must arrive whole.
    for number in $(seq 12); do ask 200 > "$WORK/drained.$number" 2>&1 & asking[number]=$!; done
    for _ in $(seq 200); do
        curl -s "$URL/metrics" | grep -qE '^vidspec:num_requests_(running|waiting)\S* ([1-9]|1[0-9])\.0' && break; sleep 0.05
    done
    sleep 1
    from=$(date +%s.%N)
    compose stop "$SERVICE" 2> /dev/null
    answered=0
    for number in $(seq 12); do wait "${asking[number]}" && answered=$((answered + 1)) || cat "$WORK/drained.$number" >&2; done
    said "stop under load, seconds" "$(seconds_since "$from")"
    said "answers that arrived whole, of 12" "$answered"
    said "exit code" "$(inspect '{{.State.ExitCode}}')"
    [ "$answered" = 12 ] && [ "$(inspect '{{.State.ExitCode}}')" = 0 ] || fail "drain"
}

# One line of source changed: what the new image does not share with the old one.
rm -rf "$WORK/changed" && mkdir "$WORK/changed"
git -C "$REPOSITORY" ls-files -z | tar -C "$REPOSITORY" --null -T - -c | tar -C "$WORK/changed" -x
echo "# changed" >> "$WORK/changed/service/vidspec_service/__main__.py"
docker tag "$IMAGE" vidspec-before:latest
CONTEXT=/work/changed write_override
compose build "$SERVICE" > "$WORK/rebuild.log" 2>&1 || fail "rebuild: $WORK/rebuild.log"
said "a changed line rewrites" \
    "$(docker system df -v --format '{{range .Images}}{{.Repository}} {{.UniqueSize}}{{"\n"}}{{end}}' | awk '$1 == "'"${IMAGE%%:*}"'" { print $2 }')"
