"""Options of commands that listen, and their checks. Importing this module does not import torch."""

import argparse
import importlib.util
import os
import ssl
from pathlib import Path
from typing import Any

from fastinfer.cli.options import API_KEY_VARIABLE, count, rate
from fastinfer.errors import RequestError

# Keys on a command line can be seen by every user of the machine; here they are separated by commas.
ADMIN_KEY_VARIABLE = "FASTINFER_ADMIN_KEY"
SSL_PASSWORD_VARIABLE = "FASTINFER_SSL_PASSWORD"


def add_listening(group: argparse._ArgumentGroup) -> None:
    """Add where to listen, keys and TLS."""
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    group.add_argument("--port", type=count(0, 65535), default=8000, metavar="N", help="default: %(default)s")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must have; may be repeated; ${API_KEY_VARIABLE} keeps it from other users",
    )
    group.add_argument(
        "--admin-key",
        action="append",
        metavar="KEY",
        help=f"key for the administrative routes, which are off without one; may be repeated; ${ADMIN_KEY_VARIABLE}",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate for TLS")
    group.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help=f"its private key; if that is encrypted, its password is expected in ${SSL_PASSWORD_VARIABLE}",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name to accept besides addresses and localhost, if the server has no key and only this machine "
        "reaches it; may be repeated",
    )
    group.add_argument("--root-path", default="", metavar="PATH", help="prefix of the paths that a proxy removes")


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the drain and the size of a body."""
    group.add_argument(
        "--drain-timeout",
        type=rate,
        default=45.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM; default: %(default)g",
    )
    group.add_argument(
        "--spot-notice",
        choices=("aws", "gcp", "azure"),
        help="drain when this cloud provider says that it takes back the machine; default: do not ask",
    )
    group.add_argument("--metadata-url", metavar="URL", help="address of its metadata service")
    group.add_argument(
        "--max-body-size",
        type=count(1),
        default=32,
        metavar="MIB",
        help="largest body of a request; default: %(default)s",
    )


def add_logs(group: argparse._ArgumentGroup) -> None:
    """Add the form of the log."""
    group.add_argument("--log-format", choices=["text", "json"], default="text", help="default: %(default)s")
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="'info' has a line per request; default: %(default)s",
    )


# What the extra "server" adds, and the server cannot do without.
PACKAGES = ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client")


def check_http(args: argparse.Namespace, command: str) -> None:
    """Check these options, and add what comes from the environment.

    Raises:
        RequestError: one is wrong, or packages are missing.
    """
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise RequestError(f"{command} needs further packages: pip install 'fastinfer[server]'")
    if args.metadata_url is not None and not args.metadata_url.startswith("http://"):
        raise RequestError(f"--metadata-url: expected an address that begins with http://, got {args.metadata_url!r}")
    if args.metadata_url is not None and args.spot_notice is None:
        raise RequestError("--metadata-url: expected --spot-notice with it, got none")
    args.api_key = (args.api_key or []) + _keys(API_KEY_VARIABLE)
    args.admin_key = (args.admin_key or []) + _keys(ADMIN_KEY_VARIABLE)
    for option, keys in (("--api-key", args.api_key), ("--admin-key", args.admin_key)):
        if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in keys):
            raise RequestError(f"{option}: expected printable ASCII characters without spaces at the ends")
    args.ssl_keyfile_password = os.environ.get(SSL_PASSWORD_VARIABLE)
    _check_tls(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password)


def http_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of :class:`fastinfer.server.config.HttpConfig`."""
    return {
        "host": args.host,
        "port": args.port,
        "uds": args.uds,
        "allowed_hosts": tuple(args.allowed_host),
        "root_path": args.root_path,
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_keyfile_password": args.ssl_keyfile_password,
        "api_keys": tuple(args.api_key),
        "admin_keys": tuple(args.admin_key),
        "max_body_bytes": args.max_body_size << 20,
        "drain_timeout_s": args.drain_timeout,
        "spot_notice": args.spot_notice,
        "metadata_url": args.metadata_url,
    }


def _check_tls(certificate: str | None, key: str | None, password: str | None) -> None:
    if (certificate is None) != (key is None):
        raise RequestError("--ssl-certfile and --ssl-keyfile: expected both or none")
    if certificate is None or key is None:
        return
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if not Path(path).is_file():
            raise RequestError(f"{option}: expected a file, got {path}")
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password or "")
    except OSError as error:  # of the file system or of OpenSSL
        raise RequestError(
            f"--ssl-certfile and --ssl-keyfile: expected a certificate and its key in PEM, encrypted with "
            f"${SSL_PASSWORD_VARIABLE} or not at all, got: {error.strerror or error}"
        ) from None


def _keys(variable: str) -> list[str]:
    return [part.strip() for part in os.environ.get(variable, "").split(",") if part]
