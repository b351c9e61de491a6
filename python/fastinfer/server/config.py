"""Settings of the server."""

from dataclasses import dataclass, field

from fastinfer.server.spot_notice import Provider


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Settings that the server of an engine and the router share.

    Attributes:
        host, port: address to listen on.
        uds: path of a Unix socket to listen on instead; ``None`` for none.
        allowed_hosts: names by which clients may address a server that listens on this machine alone and has no key,
            beside addresses, ``localhost`` and names without a dot.
        root_path: prefix of all paths that a proxy in front removes.
        ssl_certfile, ssl_keyfile: certificate and key for TLS; ``None`` for plain HTTP.
        ssl_keyfile_password: password of the key, if it is encrypted.
        api_keys: keys of which a request must have one; empty for a server without authentication.
        admin_keys: keys for the administrative routes, which are off without one; they open all other routes too.
        max_body_bytes, max_header_bytes: largest body and head of a request.
        body_timeout_s: seconds in which a head that has begun, and then the body, must have arrived.
        write_timeout_s: seconds after which a client that takes no more of its answer is cut off.
        spot_notice: cloud provider whose notice that it takes the machine back begins the drain; ``None`` for none.
        metadata_url: address of its metadata service; ``None`` for the provider's own.
        keep_alive_s: seconds for which an idle connection stays open. Balancers commonly reuse one for 60 s, and a
            server that closes it first makes them answer 502.
        drain_timeout_s: seconds that running requests get after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    spot_notice: Provider | None = None
    metadata_url: str | None = None
    keep_alive_s: int = 75
    drain_timeout_s: float = 45.0


@dataclass(frozen=True)
class ServerConfig(HttpConfig):
    """Settings of the server of an engine; those of the engine itself are arguments of :class:`fastinfer.LLM`.

    Attributes:
        model_names: names under which the model is served; answers carry the one that the request has, or else the
            first one.
        request_timeout_s, queue_timeout_s: seconds in which a request must end, and must be begun, where it names no
            limit of its own; ``None`` for no limit.
        ping_interval_s: seconds without output after which a stream gets a comment, so that proxies keep it open.
        stall_s: seconds of a single step after which the engine counts as hanging.
        response_cache: where finished answers are kept: ``"off"``, ``"memory"``, or the URL of a Redis.
        response_cache_bytes: size of the cache in memory.
        response_cache_ttl_s: seconds for which an answer is found.
        semantic_threshold: cosine similarity from which an answer to another question will do, 0.8..1; ``None`` for
            equal questions alone.
        otlp_traces_endpoint: URL to which spans are sent by OTLP over HTTP; ``None`` for none.
        tool_call_parser, reasoning_parser: formats of tool calls and of reasoning, see
            :func:`fastinfer.server.parsing.find_spec`.
        metrics_prefix: prefix of the names of the metrics. vLLM's dashboards and gateways expect its own.
    """

    model_names: tuple[str, ...]
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    ping_interval_s: float = 15.0
    stall_s: float = 120.0
    response_cache: str = field(default="memory", repr=False)
    response_cache_bytes: int = 64 << 20
    response_cache_ttl_s: float = 3600.0
    semantic_threshold: float | None = None
    otlp_traces_endpoint: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    metrics_prefix: str = "vllm"
