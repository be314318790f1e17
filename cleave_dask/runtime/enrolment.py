"""Enrolment: a device sends its token and a signing request over HTTPS and gets its certificate.

The device knows whom it talks to by the pin in its token. What it sends is small and read within seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from hashlib import sha256
from http.client import HTTPException, HTTPSConnection
from time import time
from typing import Any
from urllib.parse import urlsplit

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from cleave_dask.errors import AccessError, ClusterError, InputError, NameTakenError
from cleave_dask.runtime.credentials import DeviceFolder, ServerFolder
from cleave_dask.runtime.tokens import parse_token

logger = logging.getLogger(__name__)

PORT = 8788
"""Where devices enrol unless told otherwise."""

LARGEST = 16 << 10
"""Bytes of a request or an answer at most."""

PATIENCE = 10.0
"""Seconds within which a request must have come, and an answer."""


class Enrolment:
    """Answers devices that want to join."""

    def __init__(self, folder: ServerFolder, *, scheduler_port: int, days: float) -> None:
        self.folder = folder
        self.scheduler_port = scheduler_port
        self.days = days  # that a device's certificate holds
        files = folder.files("scheduler")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(files.certificate, files.key)
        application = Application([("/join", _Join, {"enrolment": self})], log_function=lambda _: None)
        self._server = HTTPServer(
            application,
            ssl_options=context,
            max_body_size=LARGEST,
            max_header_size=LARGEST,
            max_buffer_size=4 * LARGEST,
            idle_connection_timeout=PATIENCE,
            body_timeout=PATIENCE,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        sockets = bind_sockets(port, address=host)
        self._server.add_sockets(sockets)
        chosen: int = sockets[0].getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Listen no more."""
        self._server.stop()
        await self._server.close_all_connections()

    def answer(self, body: bytes) -> dict[str, Any]:
        """The certificate for a device, or an AccessError."""
        token, name, request = parse_join(body)
        certificate = self.folder.enrol(token, name, request.encode(), now=time(), days=self.days)
        logger.info("Device %s has enrolled", name)
        authority = self.folder.files("scheduler").authority.read_text()
        return {"certificate": certificate.decode(), "authority": authority, "scheduler_port": self.scheduler_port}


def parse_join(body: bytes) -> tuple[str, str, str]:
    """Token, name and signing request out of what anybody may send."""
    try:
        told = json.loads(body)
        fields = [told[field] for field in ("token", "name", "request")]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise AccessError("a request to join has a token, a name and a signing request") from None
    if len(told) != 3 or not all(isinstance(field, str) and field.isascii() for field in fields):
        raise AccessError("token, name and signing request are text")
    return fields[0], fields[1], fields[2]


class _Join(RequestHandler):
    def initialize(self, enrolment: Enrolment) -> None:
        self.enrolment = enrolment

    def set_default_headers(self) -> None:
        self.clear_header("Server")

    async def post(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.write(await loop.run_in_executor(None, self.enrolment.answer, self.request.body))
        except AccessError as error:
            self.set_status(403)
            self.write({"error": str(error), "taken": isinstance(error, NameTakenError)})


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of an enrolment address."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port or PORT
    except ValueError:
        scheme, host, port = "", None, 0
    if scheme != "https" or not host:
        raise InputError(f"the address to join is {url!r}; give one such as https://192.0.2.10:{PORT}")
    return host, port


def enrol(url: str, token: str, name: str, folder: DeviceFolder) -> dict[str, str]:
    """Join: make a key, have it signed, keep both in the folder; returns name and scheduler's address."""
    from cleave_dask.runtime.certificates import make_request

    host, port = parse_url(url)
    _, _, pin = parse_token(token)
    key, request = make_request(name)
    told = json.dumps({"token": token, "name": name, "request": request.decode()}).encode()
    answer = _ask(host, port, pin, told)
    address = f"[{host}]" if ":" in host else host
    facts = {"name": name, "scheduler": f"tls://{address}:{int(answer['scheduler_port'])}"}
    certificate, authority = (str(answer[field]).encode() for field in ("certificate", "authority"))
    folder.write(key=key, certificate=certificate, authority=authority, facts=facts)
    return facts


def _ask(host: str, port: int, pin: str, body: bytes) -> dict[str, Any]:
    """What the enrolment address answers; nothing is told to anyone who has not the certificate of the pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin says who it is
    connection = HTTPSConnection(host, port, timeout=PATIENCE, context=context)
    try:
        connection.connect()
        shown = connection.sock.getpeercert(binary_form=True)
        if sha256(shown or b"").hexdigest() != pin:
            raise AccessError(
                f"what answers at {host}:{port} is not the cluster that this token is for; "
                "nothing was told to it. Check the address, or ask for a new token"
            )
        connection.request("POST", "/join", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read(LARGEST))
    except (OSError, ValueError, HTTPException) as error:
        raise ClusterError(
            f"no cluster answers at https://{host}:{port} ({error}); is `cleave serve` running there, "
            "and can this machine reach it?"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        kind = NameTakenError if answer.get("taken") is True else AccessError
        raise kind(f"the cluster refused: {answer.get('error', response.status)}")
    return answer
