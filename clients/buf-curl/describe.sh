#!/bin/sh
# Prints as YAML what a server says of a service, a method, a message or an enum of its own. Reflection answers with
# descriptors; buf picks the one that was asked for.
#
#     describe.sh URL SYMBOL [FLAGS of buf curl]
set -eu
url=$1 symbol=$2
shift 2
here=$(dirname "$0")
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

buf curl --protocol grpc "$@" --data "{\"fileContainingSymbol\": \"$symbol\"}" \
    "$url/grpc.reflection.v1.ServerReflection/ServerReflectionInfo" >"$folder/answer.json"
python3 "$here/descriptor_set.py" <"$folder/answer.json" >"$folder/schema.binpb"
buf build "$folder/schema.binpb" --type "$symbol" --exclude-imports --output -#format=yaml
