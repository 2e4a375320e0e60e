"""The security options of `tpuembed serve`: API keys, TLS and limits."""

from pathlib import Path
from typing import Any

import click

from tpuembed_cli.options import option_group

__all__ = ["security_options", "take_security"]

_FILE = click.Path(path_type=Path)
_OPTIONS = [
    click.option(
        "--api-key-file",
        type=_FILE,
        help="A file with one KEY, 'NAME: KEY' or 'NAME admin: KEY' per line; requests need one ('Authorization: Bearer KEY' or "
        "'X-API-Key: KEY'), and gRPC's reload an admin's.",
    ),
    click.option("--tls-cert", type=_FILE, help="The server's certificate and its chain, PEM: TLS on both ports."),
    click.option("--tls-key", type=_FILE, help="The private key of the certificate, PEM, without a password."),
    click.option(
        "--tls-client-ca",
        type=_FILE,
        help="Certificate authorities, PEM. Clients need a certificate of one of them.  [default: none]",
    ),
    click.option(
        "--enable-cors",
        "--rest_api_enable_cors_support",
        "cors",
        is_flag=True,
        help="Allow requests from pages of other sites.",
    ),
    click.option(
        "--max-connections",
        type=click.IntRange(min=1),
        help="The most open connections per worker; more are answered 503.  [default: no limit]",
    ),
    click.option(
        "--max-header-bytes",
        type=click.IntRange(min=1),
        default=64 << 10,
        show_default=True,
        help="Longer request lines and headers are answered 431.",
    ),
    click.option(
        "--receive-seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        help="Time limit for a request to arrive, and for a client to read some of its answer.",
    ),
]


security_options = option_group(_OPTIONS)


def take_security(options: dict[str, Any]) -> Any:
    """Remove the security options from `options` and return them as `tpuembed_serving.core.security.SecuritySettings`.

    Raises:
        ConfigError: a file is invalid.
    """
    from tpuembed_serving.core.api_keys import ApiKeys
    from tpuembed_serving.core.security import ConnectionLimits, SecuritySettings

    limits = ConnectionLimits(
        connections=options.pop("max_connections"),
        header_bytes=options.pop("max_header_bytes"),
        receive_seconds=options.pop("receive_seconds"),
    )
    keys, tls = options.pop("api_key_file"), _take_tls(options)
    return SecuritySettings(
        api_keys=None if keys is None else ApiKeys.read(keys),
        tls=tls,
        cors=options.pop("cors"),
        limits=limits,
    )


def _take_tls(options: dict[str, Any]) -> Any:
    from tpuembed_serving.core.tls import TlsSettings

    certificate, key, client_ca = (options.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key")
    return TlsSettings(certificate=certificate, key=key, client_ca=client_ca)
