"""The gRPC port on our own HTTP/2 layer (`extproc.http2`): connections, streams, calls, TLS. The default transport.

The services themselves do not live here (`edge.services`), nor do Envoy's messages (`edge.envoy_wire`). Nothing here imports grpc.
"""
