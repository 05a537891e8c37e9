"""What the whole picker holds in memory with a million prefix blocks indexed: one process, fed over gRPC.

The prompts are those of `prefix_index` (30 blocks on average, 30 % of them shared), sent as chats by `bench.generator`;
the engines claim caches large enough for all of them. Every request has ended when memory is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.compare import aim
from bench.load import generate
from bench.stage import cpu_s, start_engines, start_picker
from extproc.demo.processes import Child, ChildError, Children

__all__ = ["lines", "measure"]

_NEW_BLOCKS: Final = 21
"""Per prompt, on average."""
_KV_TOKENS: Final = 10_000_000
_AIM_MB: Final = 200


async def measure(folder: Path, *, blocks: int = 1_000_000, transport: str = "native") -> dict[str, Any]:
    """Fill the index of a picker; return `{"figures": ..., "aims": [...]}`; about a minute. Raises ChildError."""
    async with Children(folder / "bench-logs") as children:
        endpoints = await start_engines(children, kv_tokens=_KV_TOKENS)
        picker, metrics_port = await start_picker(children, folder, "picker", endpoints, transport=transport)
        empty = picker.rss_bytes()
        held, prompts, seed = 0.0, 0, 1
        begin = cpu_s(picker.child)
        while held < blocks:
            wanted = max(200, int((blocks - held) / _NEW_BLOCKS))
            arguments = ["grpc", "--port", str(picker.port), "--requests", str(wanted), "--seed", str(seed)]
            result = await generate(arguments)
            if result.failed:
                raise ChildError(f"{result.failed} of {wanted} calls failed\n{picker.child.tail()}")
            prompts, seed = prompts + wanted, seed + 1
            before, held = held, await _metric(metrics_port, "extproc_prefix_index_blocks")
            if held < before + wanted:
                raise ChildError(f"the index does not grow: {held:.0f} blocks after {prompts} prompts")
        under_way = await _metric(metrics_port, "extproc_endpoint_in_flight_requests")
        full, most = picker.rss_bytes(), peak_bytes(picker.child)
        figures = {
            "transport": transport,
            "prompts": prompts,
            "blocks": held,
            "in_flight": under_way,
            "empty_mb": empty / 1e6,
            "resident_mb": full / 1e6,
            "peak_mb": most / 1e6,
            "bytes_per_block": (full - empty) / held,
            "cpu_us_per_prompt": (cpu_s(picker.child) - begin) / prompts * 1e6,
        }
    name = f"resident memory of the whole picker with {held:,.0f} blocks indexed, MB"
    return {"figures": figures, "aims": [aim(name, _AIM_MB, full / 1e6)]}


def peak_bytes(child: Child) -> int:
    """Return the most memory a child has ever held (Linux: VmHWM)."""
    for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


async def _metric(port: int, name: str) -> float:
    """Return the sum over all series of a metric."""
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as response:
        text = await response.text()
    values = [
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    ]
    if not values:
        raise ChildError(f"the picker has no metric {name}")
    return sum(values)


def lines(figures: dict[str, Any]) -> list[str]:
    """Say the figures in words."""
    empty, full, most = (figures[f"{when}_mb"] for when in ("empty", "resident", "peak"))
    blocks, prompts, each = figures["blocks"], figures["prompts"], figures["bytes_per_block"]
    before = f"resident memory of the whole picker ({figures['transport']}), in MB: {empty:.0f} at the start, "
    after = f"{full:.0f} with {blocks:,.0f} blocks of {prompts:,} prompts indexed ({each:.0f} bytes a block)"
    return [f"{before}{after}, {most:.0f} at most"]
