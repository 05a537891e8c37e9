"""The gRPC port on grpc.aio: `server.transport: grpcio`. Imported only where it is chosen, because it imports grpc.

The services themselves do not live here (`edge.services`), nor do Envoy's messages (`edge.envoy_wire`).
"""
