"""What the process asks of its operating system: listening sockets, file descriptors, watched files, certificates, tasks.

Used by all other edges; knows nothing of requests or endpoints.
"""
