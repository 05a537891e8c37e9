"""Where the list of endpoints comes from: configuration, a watched file, DNS; the place for Kubernetes.

A source tells its listeners the whole list whenever it changes. What is known of an endpoint lives in `extproc.pool`.
"""
