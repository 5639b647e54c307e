"""A peer that speaks the routes of Docker's Engine API that `mgpuctl containers` uses, over TCP.

It records what it is asked. A container that is started answers GET /health on its published port: a server on this
host, with the status that the test chooses.
"""

import json
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DOCKER = {"Version": "29.1.0", "ApiVersion": "1.52", "Components": [{"Name": "Engine"}]}
PODMAN = {"Version": "5.4.0", "ApiVersion": "1.41", "Components": [{"Name": "Podman Engine"}]}
LOG = "\x1b[2mloading\x1b[0m\r\nready \x07\n"


class HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    peer: "Peer"


class Health(BaseHTTPRequestHandler):
    server: HealthServer

    def do_GET(self) -> None:
        self.server.peer.health_asked.set()
        self.send_response(self.server.peer.health if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


class Peer(ThreadingHTTPServer):
    """`images`: those that are there. `health`: the status of /health. `create_s`: how long it makes a container.

    `gone`: what is answered about a container that is started: 404 it is removed, 409 its removal has begun.

    `ends`: what a container's inspection has once it is started, beside what it has of its own.
    """

    daemon_threads = True

    def __init__(self, version: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.version = version
        self.info: dict[str, Any] = {"Runtimes": {"runc": {}, "nvidia": {}}}
        self.asked: list[tuple[str, str, Any]] = []
        self.images: set[str] = set()
        self.pull_error = ""
        self.ends: dict[str, Any] = {}
        self.health = 200
        self.gone = 0
        self.create_s = 0.0
        self.create_asked, self.created = threading.Event(), threading.Event()
        self.health_asked = threading.Event()
        self.containers: dict[str, dict[str, Any]] = {}
        self.healths: dict[str, HealthServer] = {}
        serve(self)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path: str) -> list[Any]:
        return [body for _, asked, body in self.asked if asked == path]

    def names(self) -> set[str]:
        return {each["Name"] for each in self.containers.values()}

    def add(self, name: str, body: dict[str, Any]) -> str:
        key = f"{len(self.containers) + 1:064x}"
        state = {"Status": "created"}
        inspected = {"Id": key, "Name": f"/{name}", "State": state, "Config": body, "HostConfig": body["HostConfig"]}
        self.containers[key] = {"RestartCount": 0} | inspected
        self.created.set()
        return key

    def start(self, key: str) -> None:
        container = self.containers[key]
        container["State"]["Status"] = "running"
        container.update(self.ends)
        if not self.ends:
            (bound,) = container["HostConfig"]["PortBindings"].values()
            self.healths[key] = HealthServer((bound[0]["HostIp"], int(bound[0]["HostPort"])), Health)
            self.healths[key].peer = self
            serve(self.healths[key])

    def stop(self, key: str) -> None:
        self.containers[key]["State"]["Status"] = "exited"
        if server := self.healths.pop(key, None):
            server.shutdown()
            server.server_close()

    def close(self) -> None:
        for key in [*self.healths]:
            self.stop(key)
        self.shutdown()
        self.server_close()


def serve(server: ThreadingHTTPServer) -> None:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Peer

    def answer(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = unquote(url.path).strip("/").split("/")
        parts = parts[1:] if parts[0].startswith("v1.") else parts
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(sent) if sent else query
        self.server.asked.append((self.command, "/".join(parts), body))
        match self.command, parts:
            case "GET", ["version"]:
                self.send(self.server.version)
            case "GET", ["info"]:
                self.send(self.server.info)
            case "GET", ["images", *name, "json"]:
                there = "/".join(name) in self.server.images
                self.send({"Id": "sha256:1"} if there else {"message": "No such image"}, 200 if there else 404)
            case "POST", ["images", "create"]:
                part = {"id": "a", "status": "Downloading", "progressDetail": {"current": 1 << 30}}
                self.send({"error": self.server.pull_error} if self.server.pull_error else part)
            case "POST", ["containers", "create"] if f"/{query['name']}" in self.server.names():
                self.send({"message": f"{query['name']} is in use"}, 409)
            case "POST", ["containers", "create"]:
                self.server.create_asked.set()
                time.sleep(self.server.create_s)
                self.send({"Id": self.server.add(query["name"], body), "Warnings": []}, 201)
            case "GET", ["containers", "json"]:
                (label,) = json.loads(query["filters"])["label"]
                found = [key for key, each in self.server.containers.items() if label in each["Config"]["Labels"]]
                self.send([{"Id": key} for key in found])
            case method, ["containers", key, *rest]:
                self.of_container(method, key, rest)

    def of_container(self, method: str, key: str, rest: list[str]) -> None:
        started = self.server.containers[key]["State"]["Status"] == "running"
        match method, rest:
            case "GET" | "DELETE", _ if self.server.gone and started:
                self.send({"message": "gone"}, self.server.gone)
            case "GET", ["json"]:
                self.send(self.server.containers[key])
            case "GET", ["logs"]:
                self.send_bytes(struct.pack(">BxxxL", 1, len(LOG)) + LOG.encode())
            case "POST", ["start"]:
                self.server.start(key)
                self.send_bytes(b"", 204)
            case "POST", ["stop"]:
                self.server.stop(key)
                self.send_bytes(b"", 204)
            case "DELETE", []:
                self.server.stop(key)
                del self.server.containers[key]
                self.send_bytes(b"", 204)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815  http.server's names

    def send(self, value: Any, status: int = 200) -> None:
        self.send_bytes(json.dumps(value).encode(), status, "application/json")

    def send_bytes(self, data: bytes, status: int = 200, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...
