"""An S3-compatible server in a process of its own, and in front of it a proxy that fails as networks and servers do."""
import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request

KEYS = dict(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
ANSWERS = {"500": (b"500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>"), "403": (b"403 Forbidden", DENIED)}


def free_port():
    "A port that nobody listens on."
    with socket.create_server(("127.0.0.1", 0)) as s: return s.getsockname()[1]


class Proxy:
    "Passes bytes on, or does what `mode` says: drop, cut, hang, stuck, slow, 500, 403."

    def __init__(self, port):
        self.server, self.mode, self.delay, self.taken = port, "pass", 0.5, 0  # bytes that were passed on to the server
        self.port, self.listening, self.lock = free_port(), None, threading.Lock()
        self.up()

    @property
    def url(self): return f"http://127.0.0.1:{self.port}"

    def up(self):
        "Listen."
        self.listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listening,), daemon=True).start()

    def down(self):
        "Listen no more: connections are refused, and those there are end with the next request."
        self.mode = "drop"
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()

    def _accept(self, listening):
        with contextlib.suppress(OSError):
            while True: threading.Thread(target=self._serve, args=(listening.accept()[0],), daemon=True).start()

    def _serve(self, client):
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.server)) as server:
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if self.mode == "slow": time.sleep(self.delay)
                while self.mode == "stuck": time.sleep(0.05)
                if self.mode == "hang": continue
                if self.mode == "drop": return client.shutdown(socket.SHUT_RDWR)
                if self.mode in ANSWERS: return self._answer(client, data, *ANSWERS[self.mode])
                server.sendall(data)
                with self.lock: self.taken += len(data)

    def _answer(self, client, data, status, body):
        body = b"" if data.startswith(b"HEAD") else body
        time.sleep(0.05)
        client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Type: application/xml\r\nConnection: close\r\n"
                       + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client.shutdown(socket.SHUT_RDWR)

    def _back(self, server, client):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data[:len(data) // 2] if self.mode == "cut" else data)
                if self.mode == "cut": break
        with contextlib.suppress(OSError):
            if self.mode != "hang": client.shutdown(socket.SHUT_RDWR)


class Server:
    "The server behind its proxy."

    def __init__(self):
        self.port, self.process = free_port(), None
        self.start()
        self.proxy = Proxy(self.port)

    def start(self):
        "Begin with an empty store."
        self.process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError): return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
            assert time.monotonic() < end and self.process.poll() is None, "the server did not start"
            time.sleep(0.1)

    def kill(self):
        "End it as a machine does that loses its power; what it held is gone."
        self.process.kill()
        self.process.wait()

    def bucket(self, name):
        "Make a bucket."
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT"), timeout=20).close()
