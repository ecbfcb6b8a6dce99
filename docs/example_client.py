#!/usr/bin/env python3
"""Run a program in a sandbox: example_client.py STORE NAME PROGRAM [ARG...]"""
import json, os, socket, struct, sys

def call(store, op, **fields):
    """Send one request; give the connection, a reader on it, and the result."""
    conn = socket.socket(socket.AF_UNIX)
    conn.connect(os.path.join(store, "host.sock"))
    conn.sendall(json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n")
    reader = conn.makefile("rb")
    while True:
        line = json.loads(reader.readline())
        if line.get("event") == "progress":
            print("...", line["step"], file=sys.stderr)
        elif line["ok"]:
            return conn, reader, line.get("result")
        else:
            sys.exit("error: " + line["error"]["message"])

store, name, *argv = sys.argv[1:]
for sandbox in call(store, "ls")[2]:
    print(sandbox["name"], sandbox["phase"], file=sys.stderr)
conn, reader, _ = call(store, "exec", name=name, argv=argv)
while True:
    kind, length = struct.unpack(">BI", reader.read(5))
    payload = reader.read(length)
    if kind in (1, 2):
        stream = (sys.stdout, sys.stderr)[kind - 1].buffer
        stream.write(payload)
        stream.flush()
    elif kind == 5:
        sys.exit(json.loads(payload)["code"])
    elif kind == 6:
        sys.exit("error: " + json.loads(payload)["message"])
