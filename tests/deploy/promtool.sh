#!/bin/sh
# promtool of Debian's package `prometheus`, unpacked into the bin/ of the folder that is named, where it is not there.
# Nothing is installed in the system; root is not needed, apt-get is.
set -eu
folder=$(readlink -f "$1")
[ -x "$folder/bin/promtool" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }
dpkg -x ./*.deb .
cp usr/bin/promtool "$folder/bin/promtool.new"
mv "$folder/bin/promtool.new" "$folder/bin/promtool"
