"""Constant families of a real vLLM page that a picker has no use for, so that a page can be as long as a real one (69 kB).

Nothing here is measured; benchmarks of scraping ask for it.
"""

from __future__ import annotations

from typing import Final

PYTHON_FAMILIES: Final = "".join(
    f"# HELP {name} {doc}\n# TYPE {name} {kind}\n" + "".join(f"{name}{series}\n" for series in values)
    for name, kind, doc, values in (
        (
            "python_gc_objects_collected_total",
            "counter",
            "Objects collected during gc",
            ['{generation="0"} 31771.0', '{generation="1"} 7321.0', '{generation="2"} 637.0'],
        ),
        (
            "python_info",
            "gauge",
            "Python platform information",
            ['{implementation="CPython",major="3",minor="11"} 1.0'],
        ),
        ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", [" 7.13998336e+08"]),
        ("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", [" 9.68"]),
        ("process_open_fds", "gauge", "Number of open file descriptors.", [" 34.0"]),
    )
)


def http_families(created: str) -> str:
    """Give the families of vLLM's HTTP instrumentation with plausible constant values, for the size of the page only."""
    handlers = ("completions", "chat/completions", "models", "responses", "messages", "embeddings", "score", "rerank")
    paths = [f"/v1/{name}{suffix}" for name in handlers for suffix in ("", "/render")] + [
        "/tokenize",
        "/detokenize",
        "none",
    ]
    lines: list[str] = []

    def head(name: str, kind: str, doc: str) -> None:
        lines.append(f"# HELP {name} {doc}\n# TYPE {name} {kind}\n")

    for name, doc in (
        (
            "http_request_size_bytes",
            "Content length of incoming requests by handler. Only value of header is respected.",
        ),
        (
            "http_response_size_bytes",
            "Content length of outgoing responses by handler. Only value of header is respected.",
        ),
    ):
        head(name, "summary", doc)
        lines += [
            f'{name}_count{{handler="{path}"}} 146.0\n{name}_sum{{handler="{path}"}} 263359.0\n' for path in paths
        ]
        head(f"{name}_created", "gauge", doc)
        lines += [f'{name}_created{{handler="{path}"}} {created}\n' for path in paths]
    name, doc = "http_request_duration_seconds", "Latency with only few buckets by handler."
    head(name, "histogram", doc)
    for path in paths:
        for bound in ("0.1", "0.5", "1.0", "+Inf"):
            lines.append(f'{name}_bucket{{handler="{path}",le="{bound}",method="POST"}} 146.0\n')
        lines.append(
            f'{name}_count{{handler="{path}",method="POST"}} 146.0\n{name}_sum{{handler="{path}",method="POST"}} 280.34\n'
        )
    head("http_requests_total", "counter", "Total number of requests by method, status and handler.")
    for path in paths:
        for status in ("2xx", "4xx"):
            lines.append(f'http_requests_total{{handler="{path}",method="POST",status="{status}"}} 146.0\n')
    return "".join(lines)
