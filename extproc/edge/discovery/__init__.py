"""Sources of the list of endpoints: configuration, a watched file, DNS. A Kubernetes source belongs here too.

A source reports the whole list to its listener whenever it changes. What is known of an endpoint is kept in `extproc.pool`.
"""
