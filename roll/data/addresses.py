"""Addresses: which are this machine, and pictures at the others, fetched once into a cache of files by content.

Only hosts that are allowed are asked, within bounds. An address that was fetched is not asked again, so that a run that
goes on later has the same pictures; whoever wants new ones deletes the cache.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import logging
import os
import socket
import time
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll.utils.progress import advance

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MOST_BYTES = 32 << 20
"""Of a picture."""
SECONDS = 60.0
"""For a picture with all its redirects; a server that says nothing has ``_PATIENCE``."""
_PATIENCE = 15.0
_MOST_HOPS = 5
_ATTEMPTS = 3
_RETRIED = (408, 429)
_THREADS = 16
_KEY = "image_urls"


def is_loopback(host: str) -> bool:
    """Tells whether a name or address is this machine itself, which no proxy leads to."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


class PictureError(ValueError):
    """Why a picture cannot be used, with its place."""


class _BusyError(PictureError):
    """It may be there a little later."""


@dataclass(frozen=True)
class Address:
    """A picture at an address.

    Args:
        hosts: that may be asked; none: all public ones.

    Raises:
        PictureError: that one may not.
    """

    url: str
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(_parsed(self.url), self.hosts)

    @property
    def is_here(self) -> bool:
        """Tells whether it was fetched."""
        return self._note.is_file()

    @property
    def digest(self) -> str:
        """SHA-256 of its bytes.

        Raises:
            PictureError: it cannot be fetched.
        """
        if not self.is_here:
            data = _fetch(self.url, self.hosts)
            digest = hashlib.sha256(data).hexdigest()
            _write(_cache() / digest, data)
            _write(self._note, digest.encode())
        return self._note.read_text()

    def read(self) -> bytes:
        """Its bytes.

        Raises:
            PictureError: it cannot be fetched, or its file in the cache is another one now.
        """
        file = _cache() / self.digest
        data = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(data).hexdigest() != file.name:
            self._note.unlink(missing_ok=True)
            raise PictureError(f"{shown(self.url)}: its file {file} has been changed since it was fetched; start again")
        return data

    @property
    def _note(self) -> Path:
        """File that holds the digest."""
        return _cache() / f"{hashlib.sha256(self.url.encode()).hexdigest()}.address"


def fetch_all(addresses: Iterable[Address]) -> Mapping[Address, str | PictureError]:
    """Digests of many, or why they cannot be had."""
    wanted = list(dict.fromkeys(addresses))
    if missing := sum(not address.is_here for address in wanted):
        logger.warning("fetching %s pictures into %s", f"{missing:,}", _cache())

    def fetch(address: Address) -> str | PictureError:
        advance()
        try:
            return address.digest
        except PictureError as error:
            return error

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pictures") as pool:
        return dict(zip(wanted, pool.map(fetch, wanted), strict=True))


def shown(url: str) -> str:
    """An address for people, without what may be a secret in it."""
    parsed = _parsed(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))[:200]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "roll" / "pictures"


def _write(path: Path, data: bytes) -> None:
    """Writes a file that others may be writing too."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise PictureError(f"{path}: {error}; XDG_CACHE_HOME names another cache") from error


def _parsed(url: str) -> httpx.URL:
    import httpx  # a tenth of a second, which rows without addresses do without

    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise PictureError(f"{url[:80]!r}: no address ({error})") from error


def _check(url: httpx.URL, hosts: tuple[str, ...]) -> None:
    """Raises a ``PictureError`` if it may not be asked."""
    named = url.host in hosts
    if url.userinfo:
        raise PictureError(f"{shown(str(url))}: a login in the address, expected none")
    if url.scheme != "https" and not (url.scheme == "http" and named):
        raise PictureError(f"{shown(str(url))}: expected https://, or http:// of a host that {_KEY} names")
    if hosts and not named:
        raise PictureError(f"{shown(str(url))}: expected one of the hosts in {_KEY}: {', '.join(hosts)}")
    if not url.host:
        raise PictureError(f"{shown(str(url))}: an address without a host")


@functools.cache
def _client() -> httpx.Client:
    import httpx

    headers = {"accept": "image/*", "accept-encoding": "identity"}
    return httpx.Client(headers=headers, timeout=_PATIENCE, limits=httpx.Limits(max_connections=_THREADS))


def _fetch(url: str, hosts: tuple[str, ...]) -> bytes:
    import tenacity

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_BusyError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=5),
        reraise=True,
    )
    return retrying(_fetch_once, url, hosts)


def _fetch_once(url: str, hosts: tuple[str, ...]) -> bytes:
    import httpx

    end, at = time.monotonic() + SECONDS, _parsed(url)
    try:
        for _ in range(_MOST_HOPS + 1):
            _check(at, hosts)
            proxied = _goes_by_proxy(at)
            if at.host not in hosts:
                _check_public(at, proxied)
            with _client().stream("GET", at) as response:
                if at.host not in hosts and not proxied:
                    _check_ip(at, response.extensions["network_stream"].get_extra_info("server_addr")[0])
                if response.next_request is None:
                    return _body(response, url, end)
                at = response.next_request.url
    except httpx.HTTPError as error:
        raise _BusyError(f"{shown(url)}: {type(error).__name__}: {error}") from error
    raise PictureError(f"{shown(url)}: more than {_MOST_HOPS} redirects")


def _body(response: httpx.Response, url: str, end: float) -> bytes:
    status, data = response.status_code, bytearray()
    if status != 200:
        kind = _BusyError if status in _RETRIED or status >= 500 else PictureError
        raise kind(f"{shown(url)}: the server answers {status}, expected 200")
    for piece in response.iter_bytes():
        data += piece
        if len(data) > MOST_BYTES:
            raise PictureError(f"{shown(url)}: more than {MOST_BYTES:,} bytes")
        if time.monotonic() > end:
            raise _BusyError(f"{shown(url)}: not there within {SECONDS:g} s")
    return bytes(data)


def _goes_by_proxy(url: httpx.URL) -> bool:
    """Tells whether a proxy of the environment, which finds the host by itself, is asked."""
    proxies = urllib.request.getproxies()
    return bool(proxies.get(url.scheme) or proxies.get("all")) and not urllib.request.proxy_bypass(url.host)


def _check_public(url: httpx.URL, proxied: bool) -> None:
    """Looks at the IP addresses of a host before it is asked."""
    try:
        known = socket.getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM) if not proxied else ()
    except OSError as error:
        raise _BusyError(f"{shown(str(url))}: the host is not known ({error})") from error
    for *_, where in known:
        _check_ip(url, str(where[0]))
    if proxied:
        try:
            ipaddress.ip_address(url.host)
        except ValueError:
            return
        _check_ip(url, url.host)


def _check_ip(url: httpx.URL, ip: str) -> None:
    if not ipaddress.ip_address(ip.partition("%")[0]).is_global:
        raise PictureError(f"{shown(str(url))}: {ip} is not public, expected so of a host that {_KEY} does not name")
