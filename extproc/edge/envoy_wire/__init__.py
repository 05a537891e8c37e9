"""Envoy's messages: protobuf bytes to the events of `extproc.protocol`, and its replies back to bytes.

Translates and decides nothing. Transports and services do not live here.
"""
