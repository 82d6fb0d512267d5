"""Makes a file of descriptors, as `buf build` reads one, of an answer of server reflection: from stdin to stdout."""

import base64
import json
import sys

answer = json.load(sys.stdin)
if "errorResponse" in answer:
    sys.exit("the server knows no such symbol")
for file in answer["fileDescriptorResponse"]["fileDescriptorProto"]:
    data = base64.b64decode(file + "==")
    length, prefix = len(data), b"\x0a"  # field 1 of google.protobuf.FileDescriptorSet, and its length as a varint
    while length > 127:
        prefix += bytes([length & 127 | 128])
        length >>= 7
    sys.stdout.buffer.write(prefix + bytes([length]) + data)
