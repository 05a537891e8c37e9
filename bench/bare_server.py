"""A bare grpc.aio ext_proc server: answers the same messages as the picker and looks at nothing.

It is the yardstick of `make bench`: what gRPC in Python costs before anything is decided. It sends every request to the
next endpoint of its list, echoes every body (of the response too, where Envoy sends it), and swallows the access log.

    python -m bench.bare_server --port 9002 --endpoints 127.0.0.1:8001,127.0.0.1:8002
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.loop import run

DESTINATION = "x-gateway-destination-endpoint"


def bare_handlers(endpoints: list[str]) -> list[grpc.GenericRpcHandler]:
    """Return the ext_proc and access log services."""
    turn = itertools.cycle(endpoints)

    async def process(
        requests: AsyncIterator[pb.ProcessingRequest], _context: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        held: list[pb.ProcessingResponse] = []
        headers: pb.ProcessingResponse | None = None
        async for request in requests:
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                destination = next(turn)
                headers = pb.ProcessingResponse(
                    request_headers=pb.HeadersResponse(
                        response=pb.CommonResponse(
                            header_mutation=pb.HeaderMutation(
                                set_headers=[
                                    base_pb2.HeaderValueOption(
                                        header=base_pb2.HeaderValue(key=DESTINATION, raw_value=destination.encode())
                                    )
                                ]
                            )
                        )
                    )
                )
                headers.dynamic_metadata.update({"envoy.lb": {DESTINATION: destination}})
                if request.request_headers.end_of_stream:
                    yield headers
                    headers = None
            elif kind == "request_body":
                part = request.request_body
                held.append(
                    pb.ProcessingResponse(
                        request_body=pb.BodyResponse(
                            response=pb.CommonResponse(
                                body_mutation=pb.BodyMutation(
                                    streamed_response=pb.StreamedBodyResponse(
                                        body=part.body, end_of_stream=part.end_of_stream
                                    )
                                )
                            )
                        )
                    )
                )
                if part.end_of_stream:
                    if headers is not None:
                        yield headers
                        headers = None
                    for answer in held:
                        yield answer
                    held = []
            elif kind == "request_trailers":
                if headers is not None:
                    yield headers
                    headers = None
                for answer in held:
                    yield answer
                held = []
                yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            elif kind == "response_headers":
                yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
            elif kind == "response_body":
                part = request.response_body
                yield pb.ProcessingResponse(
                    response_body=pb.BodyResponse(
                        response=pb.CommonResponse(
                            body_mutation=pb.BodyMutation(
                                streamed_response=pb.StreamedBodyResponse(
                                    body=part.body, end_of_stream=part.end_of_stream
                                )
                            )
                        )
                    )
                )
            elif kind == "response_trailers":
                yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    async def logs(entries: AsyncIterator[Any], _context: Any) -> als_pb2.StreamAccessLogsResponse:
        async for _ in entries:
            pass
        return als_pb2.StreamAccessLogsResponse()

    return [
        grpc.method_handlers_generic_handler(
            "envoy.service.ext_proc.v3.ExternalProcessor",
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    process,
                    request_deserializer=pb.ProcessingRequest.FromString,
                    response_serializer=pb.ProcessingResponse.SerializeToString,
                )
            },
        ),
        grpc.method_handlers_generic_handler(
            "envoy.service.accesslog.v3.AccessLogService",
            {
                "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                    logs,
                    request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
                    response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
                )
            },
        ),
    ]


async def serve(port: int, endpoints: list[str]) -> None:
    """Serve until SIGTERM."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(tuple(bare_handlers(endpoints)))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("envoy.service.ext_proc.v3.ExternalProcessor", health_pb2.HealthCheckResponse.SERVING)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await server.stop(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--endpoints", required=True, metavar="IP:PORT,...")
    args = parser.parse_args()
    run(serve(args.port, args.endpoints.split(",")))


if __name__ == "__main__":
    main()
