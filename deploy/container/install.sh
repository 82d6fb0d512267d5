#!/bin/sh
# The steps of which an image of runahead is made. The Containerfile runs them and installs nothing besides, and
# `make container` runs them in a clean root:
#
#   install.sh system                        Debian's packages, the user that the service runs as, the folder for models
#   install.sh tools                         what the next step needs; for a root that is thrown away
#   install.sh wheels cpu|cuda FROM TO       runahead's wheel, built from the sources in FROM, and all that it needs, as
#                                            wheels in the folder TO; needs a network
#   install.sh package FROM                  the wheels of the folder FROM, in an environment of their own; no network
#   install.sh compiler                      a C compiler, for Triton where it has no kernels yet; see docs/container.md
#
# Variables. PYTHON: the interpreter whose pip the wheels are made with (python3). PYTHON_VERSION: of the image's Python
# (that interpreter's). EXTRAS: of runahead's wheel (chat,gguf,kv-events,otel,structure,vllm-facade). REVISION: the commit
# of the sources, where they are no checkout. pip has its own: PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS.
set -eu

home=/opt/runahead
user=10001 # a number, so that a cluster can see that it is not root

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

debian_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends "$@" </dev/null
    apt-get clean
    rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
}

system() {
    debian_packages python3
    groupadd --gid "$user" runahead
    useradd --uid "$user" --gid "$user" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin runahead
    mkdir -p /models
}

tools() {
    debian_packages python3-pip ca-certificates
}

compiler() {
    debian_packages gcc libc6-dev libpython3-dev
}

wheels() {
    device=$1 from=$2 to=$3
    python=${PYTHON:-python3}
    export PIP_CONSTRAINT="$from/constraints.txt" PIP_BUILD_CONSTRAINT="$from/constraints.txt"
    export RUNAHEAD_COMMIT="${REVISION:-}"
    pinned=$(sed -n 's/^torch==//p' "$from/constraints.txt")
    case $device in
        # A torch without CUDA says so in its version, and is gigabytes smaller.
        cpu) torch="torch==$pinned+cpu" ;;
        cuda) torch="torch==$pinned" ;;
        *) fail "wheels are for 'cpu' or 'cuda', not for '$device'" ;;
    esac
    mkdir -p "$to"
    if [ "$device" = cpu ] && ! "$python" -m pip download --quiet --no-deps --only-binary :all: \
        ${PYTHON_VERSION:+--python-version "$PYTHON_VERSION"} --dest "$to" "$torch"; then
        fail "pip finds no $torch. Name an index of wheels for CPUs in PIP_EXTRA_INDEX_URL, or a folder with that wheel" \
            "in PIP_FIND_LINKS (docs/container.md)."
    fi
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$to" "$from"
    "$python" -m pip download --quiet --only-binary :all: ${PYTHON_VERSION:+--python-version "$PYTHON_VERSION"} \
        --find-links "$to" --dest "$to" "$torch" "$(ls "$to"/runahead_server-*.whl)[${EXTRAS-chat,gguf,kv-events,otel,structure,vllm-facade}]"
    # With which they are installed, and which does not stay.
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$to/pip" pip
}

package() {
    from=$1
    [ -n "$(ls "$from"/runahead_server-*.whl 2>/dev/null)" ] || fail "no wheel of runahead is in '$from'"
    python3 -m venv --without-pip "$home"
    # pip runs from its own wheel. It compiles every module, which nobody can do later in a tree that is read-only.
    pip=$(ls "$from"/pip/pip-*.whl)/pip
    "$home/bin/python" "$pip" install --quiet --no-index --no-cache-dir --no-deps --root-user-action ignore "$from"/*.whl
    "$home/bin/python" "$pip" --python "$home/bin/python" check
    "$home/bin/runahead" --version
}

[ $# -gt 0 ] || fail "name a step: system, tools, wheels, package or compiler"
step=$1
shift
case $step:$# in
    system:0 | tools:0 | compiler:0 | package:1 | wheels:3) "$step" "$@" ;;
    *) fail "there is no step '$step' with $# arguments" ;;
esac
