#!/usr/bin/env bash
# Builds an image and tests it under docker-compose.yml, on any Debian-like machine and without a container registry:
# engine and base image come from Debian's packages (debootstrap), Python's packages from this machine's pip indexes.
#
#   sudo deploy/build_without_registry.sh [cpu|build-cuda]
#
# cpu (the default) builds the image without CUDA and then, under the Compose policy: starts it until it is ready, asks
# about a rendered clip, measures its health probe, restarts it, kills it with -9, stops it while it answers, and
# changes a line of source. build-cuda builds the other image, runs Triton's compiler in it, and changes a line: no
# GPU is needed. Figures go to stdout; after a failure the exit code is not 0.
#
# Needs root, debootstrap and curl, 20 GB of disk, no other Docker and nothing else on port 8000.
# WORK             all files of this script; removed after success if KEEP is unset       [/var/tmp/vidspec-images]
# PIP_CONF         pip's settings for the build, given as a secret                    [the indexes of `pip config`]
# TORCH_CPU_INDEX  index of torch without CUDA; empty: the usual index, with the larger torch with CUDA      [empty]
set -Eeuo pipefail

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VARIANT=${1:-cpu}
WORK=${WORK:-/var/tmp/vidspec-images}
ENGINE=$WORK/engine
URL=http://127.0.0.1:8000
SOCKET=unix:///run/vidspec-docker.sock

case $VARIANT in
    cpu) SERVICE=cpu ;;
    build-cuda) SERVICE=vidspec ;;
    *) echo "usage: $0 [cpu|build-cuda]" >&2 && exit 2 ;;
esac

# Run in a separate mount namespace: its mounts vanish with its last process.
if [ -z "${IN_NAMESPACE:-}" ]; then
    IN_NAMESPACE=1 exec unshare --mount --propagation private "$0" "$@"
fi

trap 'echo "FAILED: line $LINENO: $BASH_COMMAND" >&2' ERR
fail() { echo "FAILED: $*" >&2 && exit 1; }
report() { printf '%-48s %s\n' "$1" "$2"; }
now() { date +%s.%N; }
seconds_since() { awk -v from="$1" -v to="$(now)" 'BEGIN { printf "%.1f", to - from }'; }
docker() { chroot "$ENGINE" docker --host "$SOCKET" "$@"; }
compose() { docker compose --project-directory /repository -f /repository/docker-compose.yml -f /work/override.yml "$@"; }
inspect() { docker inspect -f "$1" "$(compose ps --all --quiet "$SERVICE")"; }
status_of() { curl -s -o /dev/null -w '%{http_code}' "$URL/$1" || true; }

# --- the engine ---

make_root() {  # $1: name, $2: release, $3: packages; an unfinished one is made again
    [ -e "$WORK/$1" ] && return
    rm -rf "$WORK/$1.part"
    debootstrap --variant=minbase --include="$3" "$2" "$WORK/$1.part" > "$WORK/$1.log" || fail "debootstrap: $WORK/$1.log"
    mv "$WORK/$1.part" "$WORK/$1"
}

make_roots() {
    mkdir -p "$WORK"
    make_root engine trixie docker.io,docker-cli,docker-buildx,docker-compose,ca-certificates
    make_root base bookworm python3-venv,libpython3-dev,ca-certificates  # Triton's launchers include Python's headers
    ln -sf python3 "$WORK/base/usr/bin/python"
    rm -rf "$WORK"/base/var/cache/apt/archives/*.deb "$WORK"/base/var/lib/apt/lists/*
    # Certificates that this machine trusts, and its resolver.
    cp /etc/ssl/certs/ca-certificates.crt "$WORK/base/etc/ssl/certs/"
    cp --dereference /etc/resolv.conf "$ENGINE/etc/resolv.conf"
}

start_engine() {
    [ ! -e /sys/class/net/docker0 ] || fail "there is a docker0 already: another Docker runs here"
    mkdir -p "$WORK/docker" "$ENGINE/var/lib/docker" "$ENGINE/repository" "$ENGINE/work"
    mount --bind "$ENGINE" "$ENGINE"
    for place in proc sys dev; do mount --rbind "/$place" "$ENGINE/$place"; done
    mount --bind "$WORK/docker" "$ENGINE/var/lib/docker"
    mount --bind "$REPOSITORY" "$ENGINE/repository"
    mount --bind "$WORK" "$ENGINE/work"
    # With a chroot alone, `docker exec` and so every health check would run in the machine's own root.
    # The port is published by a proxy, so that the machine's network rules stay as they are.
    unshare --mount --propagation private sh -c 'cd "$1" && pivot_root . mnt && exec chroot . sh -c "umount -l /mnt && exec dockerd \
        --iptables=false --ip-forward=false --host $2 --exec-root /run/vidspec-docker --pidfile /run/vidspec-docker.pid"' \
        - "$ENGINE" "$SOCKET" > "$WORK/dockerd.log" 2>&1 &
    DOCKERD=$!
    trap clean_up EXIT
    for _ in $(seq 120); do docker version > /dev/null 2>&1 && return; sleep 0.5; done
    fail "dockerd did not start: $WORK/dockerd.log"
}

clean_up() {  # restores the machine: no daemon, no bridge
    local status=$?
    trap - ERR
    [ ! -e "$WORK/override.yml" ] || compose --profile cpu down --volumes --timeout 5 > /dev/null 2>&1 || true
    kill "$DOCKERD" && wait "$DOCKERD" || true
    ip link delete docker0 || true
    if [ "$status" = 0 ] && [ -z "${KEEP:-}" ]; then
        cd / && umount -R "$ENGINE" && rm -rf --one-file-system "$WORK"
    fi
    exit "$status"
}

# --- the image ---

# Differences from docker-compose.yml: the base image and pip's indexes. The policy is unchanged.
write_override() {  # $1: the sources, as the engine sees them
    cat > "$WORK/override.yml" <<YAML
secrets:
  pip.conf:
    file: /work/pip.conf
services:
  $SERVICE:
    build:
      context: $1
      network: host
      args: {BASE: "vidspec-base", TORCH_CPU_INDEX: "${TORCH_CPU_INDEX:-}"}
      secrets: [pip.conf]
YAML
}

write_pip_conf() {  # the indexes of `pip config`; local folders are left out, because the build cannot see them
    if [ -n "${PIP_CONF:-}" ]; then
        cp "$PIP_CONF" "$WORK/pip.conf"
        return
    fi
    {
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
        python3 -m pip config list 2> /dev/null | grep -v file: \
            | sed -nE "s/^(global|user|:env:)\.((extra-)?index-url|trusted-host|timeout)='(.*)'$/\2 = \4/p" || true
    } > "$WORK/pip.conf"
}

build() {
    docker image inspect vidspec-base > /dev/null 2>&1 || tar -C "$WORK/base" -c . | docker import - vidspec-base > /dev/null
    write_pip_conf
    write_override /repository
    local from
    from=$(now)
    compose --progress plain build "$SERVICE" > "$WORK/build.log" 2>&1 || { tail -30 "$WORK/build.log" >&2; fail "$WORK/build.log"; }
    IMAGE=$(compose config --images "$SERVICE")
    [[ $IMAGE == *:* ]] || IMAGE=$IMAGE:latest
    report "build, seconds" "$(seconds_since "$from")"
    report "image, bytes" "$(docker image inspect -f '{{.Size}}' "$IMAGE")"
}

change_a_line() {  # and print the size of what the new image does not share with the old one
    rm -rf "$WORK/changed" && mkdir "$WORK/changed"
    git -C "$REPOSITORY" ls-files -z | tar -C "$REPOSITORY" --null -T - -c | tar -C "$WORK/changed" -x
    echo "# changed" >> "$WORK/changed/service/vidspec_service/__main__.py"
    docker tag "$IMAGE" vidspec-before:latest
    write_override /work/changed
    compose --progress plain build "$SERVICE" > "$WORK/rebuild.log" 2>&1 || { tail -30 "$WORK/rebuild.log" >&2; fail "$WORK/rebuild.log"; }
    docker system df -v --format '{{range .Images}}{{.Repository}}:{{.Tag}} {{.UniqueSize}}\n{{end}}' > "$WORK/sizes.txt"
    report "a changed line rewrites" "$(awk -v image="$IMAGE" '$1 == image { print $2 }' "$WORK/sizes.txt")"
}

compile_a_launcher() {  # as Triton does for every kernel, with a /tmp that is noexec
    local launcher
    launcher=$(docker run --rm --read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges=true \
        --entrypoint python "$IMAGE" -c '
from triton.runtime.build import compile_module_from_src
source = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }"""
print(compile_module_from_src(source, "launcher").__file__)')
    report "Triton compiled and loaded" "$launcher"
}

# --- the container, under the policy of docker-compose.yml ---

ready_since() {  # $1: what, $2: since when; wall seconds, and CPU seconds because the machine may be shared
    for _ in $(seq 3000); do
        [ "$(status_of health/ready)" = 200 ] && break
        sleep 0.1
    done
    local took
    took=$(seconds_since "$2")
    [ "$(status_of health/ready)" = 200 ] || { compose logs --tail 20 "$SERVICE" >&2; fail "$1: not ready after $took s"; }
    report "$1 to ready, seconds (of CPU)" "$took ($(compose exec -T "$SERVICE" bash -c \
        'cat /sys/fs/cgroup/cpuacct/cpuacct.usage || awk "/^usage_usec/ { print \$2 * 1000 }" /sys/fs/cgroup/cpu.stat' 2> /dev/null \
        | awk '{ printf "%.1f", $1 / 1e9 }'))"
}

ask() {  # $1: tokens; the rest: more fields
    curl -sS --fail-with-body -F "video=@$WORK/clip.mp4" -F prompt='Describe the video.' -F max_tokens="$1" "${@:2}" "$URL/v1/video-chat"
}

in_flight() { curl -s "$URL/metrics" | awk '/^vidspec:num_requests_(running|waiting)/ { sum += $2 } END { print sum + 0 }'; }

start_and_ask() {
    local from
    from=$(now)
    # The command that a user types: it builds the image, here from the cache, and pulls nothing.
    compose up --detach "$SERVICE" > "$WORK/up.log" 2>&1 || { cat "$WORK/up.log" >&2; fail "up"; }
    ready_since "up, first start" "$from"
    compose exec -T "$SERVICE" sh -c 'vidspec render-clip --seed 7 /tmp/clip.mp4 >&2 && cat /tmp/clip.mp4' \
        > "$WORK/clip.mp4" 2> "$WORK/truth.txt"
    ask 64 > "$WORK/answer.json"
    report "the clip shows" "$(tr '\n' ' ' < "$WORK/truth.txt")"
    report "the answer" "$(python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])' < "$WORK/answer.json")"
    report "the sandbox of decode children lacks" \
        "$(compose logs "$SERVICE" | grep 'confined without' | grep -oE '"missing": [^}]*' | head -1 || echo nothing)"
}

measure_probe() {
    local probe
    probe=$(docker image inspect -f '{{index .Config.Healthcheck.Test 3}}' "$IMAGE")
    report "100 probes, seconds of CPU (user + system)" "$(compose exec -T -e PROBE="$probe" "$SERVICE" \
        bash -c 'TIMEFORMAT="%U + %S"; time for _ in {1..100}; do bash -c "$PROBE" || exit 1; done' 2>&1)"
    ! compose exec -T -e VIDSPEC_PORT=9 "$SERVICE" bash -c "$probe" 2> /dev/null || fail "the probe is green where nothing listens"
}

restart_and_kill() {
    local from
    from=$(now)
    compose restart "$SERVICE" 2> /dev/null
    ready_since "stop and start, warm cache," "$from"
    # This kills the server, not the container: init ends with the server, and the restart policy starts the container.
    local server
    server=$(pgrep -P "$(inspect '{{.State.Pid}}')")
    from=$(now)
    kill -9 "$server"
    while [ "$(status_of health/live)" = 200 ]; do sleep 0.05; done
    ready_since "kill -9" "$from"
    report "restarts by Docker" "$(inspect '{{.RestartCount}}')"
    for _ in $(seq 60); do [ "$(inspect '{{.State.Health.Status}}')" = healthy ] && break; sleep 1; done
    report "health as Docker sees it" "$(inspect '{{.State.Health.Status}}')"
}

drain() {  # twelve requests are running or waiting at SIGTERM; each answer must be complete
    local asking=() answered=0 begun from number
    ask 64 > /dev/null
    # Long enough that the first has not ended when the last begins.
    for number in $(seq 12); do ask 512 -F ignore_eos=true > "$WORK/drained.$number" 2>&1 & asking+=($!); done
    for _ in $(seq 100); do
        begun=$(in_flight)
        [ "$begun" -lt 12 ] || break
        sleep 0.05
    done
    from=$(now)
    compose stop "$SERVICE" 2> /dev/null
    for number in "${asking[@]}"; do wait "$number" && answered=$((answered + 1)) || true; done
    report "in flight at SIGTERM" "$begun"
    report "stopped after, seconds" "$(seconds_since "$from")"
    report "complete answers, of 12" "$answered"
    report "exit code" "$(inspect '{{.State.ExitCode}}')"
    [ "$begun" -gt 0 ] && [ "$answered" = 12 ] && [ "$(inspect '{{.State.ExitCode}}')" = 0 ] || fail "drain: $WORK/drained.*"
}

make_roots
start_engine
build
if [ "$VARIANT" = cpu ]; then
    start_and_ask
    measure_probe
    restart_and_kill
    drain
else
    compile_a_launcher
fi
change_a_line
