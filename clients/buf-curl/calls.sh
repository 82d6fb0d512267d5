#!/bin/sh
# What one does with a service in the first hour, with nothing but its address: every call goes by server reflection.
#
#     calls.sh URL [FLAGS of buf curl]
#
# URL is http://HOST:PORT, or through TLS and with a token:
#
#     calls.sh https://HOST:PORT --cacert authority.crt --header "authorization: Bearer $TOKEN" --reflect-header '*'
set -eu
url=$1
shift
here=$(dirname "$0")
service=runahead.v1.GenerationService
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# call METHOD JSON [FLAGS]. buf's own protocol is Connect; the server speaks gRPC.
call() {
    method=$1 data=$2
    shift 2
    buf curl --protocol grpc "$@" --data "$data" "$url/$service/$method"
}

echo "== services"
buf curl --protocol grpc "$@" --list-services "$url"
echo "== methods"
buf curl --protocol grpc "$@" --list-methods "$url"

for symbol in $service $service.Abort runahead.v1.AbortRequest; do
    echo "== describe $symbol"
    "$here/describe.sh" "$url" "$symbol" "$@"
done

echo "== Generate"
call Generate '{"text": "def f(x):\n", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 8}}' "$@"

echo "== Abort"
id=curl-$$
call Generate "{\"request_id\": \"$id\", \"text\": \"x\", \"stopping\": {\"max_tokens\": 2000, \"ignore_eos\": true}}" \
    "$@" >"$output" &
stream=$!
until grep -q '"delta"' "$output"; do
    kill -0 $stream # fails, and ends this script, if the stream has ended before it brought anything
    sleep 0.1
done
call Abort "{\"request_ids\": [\"$id\"]}" "$@"
wait $stream
grep '"reason"' "$output"

echo "== Stats"
call Stats '{}' "$@"

# The exit status of a refusal is its gRPC code times 8. A detail's value is its message, in base64.
echo "== refused"
call Generate '{"text": "x", "stopping": {"max_tokens": 0}}' "$@" 2>&1 || echo "exit status $?"
