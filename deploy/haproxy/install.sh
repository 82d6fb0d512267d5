#!/bin/sh
# HAProxy of Debian, where there is none yet: unpacked into the folder that is named, with a command `haproxy` in its
# bin/. Nothing is installed in the system and no service is started; root is not needed, apt-get is.
set -eu
PATH="$PATH:/usr/sbin"
command -v haproxy >/dev/null 2>&1 && exit 0
folder=$(readlink -f "$1")
[ -x "$folder/bin/haproxy" ] && exit 0
mkdir -p "$folder/haproxy" "$folder/bin"
cd "$folder/haproxy"
packages="haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1"
# shellcheck disable=SC2086
apt-get download -q $packages || { apt-get update -q && apt-get download -q $packages; }
for package in ./*.deb; do
    dpkg -x "$package" .
done
libraries=$(dirname "$(find "$folder/haproxy" -name 'liblua5.3.so.0' | head -n 1)")
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$folder/haproxy/usr/sbin/haproxy" >"$folder/bin/haproxy.new"
chmod +x "$folder/bin/haproxy.new"
mv "$folder/bin/haproxy.new" "$folder/bin/haproxy"
