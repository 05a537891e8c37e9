"""The prose around the generated tables of `docs/configuration.md`. Its examples are loaded by a test."""

from __future__ import annotations

from typing import Final

__all__ = ["AFTER", "BEFORE"]

BEFORE: Final = """\
# Configuration

<!-- Generated from extproc/config/; `make docs` makes it again. -->

extproc reads one YAML (or JSON) document: `extproc serve --config FILE`. Every key has a default, so an empty file is a
valid configuration of a picker without endpoints. Command-line flags beat the file.

```yaml
apiVersion: extproc/v1alpha1
kind: ExtprocConfig
pool:
  endpoints: [10.0.0.7:8000, 10.0.0.8:8000]
routing:
  strategy: weighted
  weights: {prefix: 4, queue: 2, in-flight: 5, kv-cache: 1}
```

**Checking.** `extproc check-config FILE` says what is wrong without starting anything. Unknown keys, wrong types and
impossible values are refused, all of them in one go, each with its line, its path, what was found and what is allowed:

```text
config.yaml: line 4: server.grpcPort: unknown key; did you mean `grpc_port`? allowed here: ...
config.yaml: line 9: routing.weights.queue: found the number -1; allowed: a number, at least 0 and at most 1,000
```

At start a bad configuration ends extproc with exit status 2.

**Changing it while it runs.** The file is checked for changes once a second. Changed content is validated first and
applies from the next request on; bad content is logged, shows in the metrics `extproc_config_last_reload_successful`
and `extproc_config_reloads_total`, and the last good configuration stays in force. The symbolic-link swap that
Kubernetes does for a mounted ConfigMap is detected, and so is an atomic rename; a file written in place is read when it
has not changed for a second. A file that vanishes changes nothing. Keys marked "needs a restart" keep their old value
until then; the log names them, and the rest of the change applies.

SIGHUP makes the picker read everything again at once, changed or not: this file, the endpoints file, the certificates
of the gRPC port and the CA for scraping; host names are resolved again. Bad content is refused in the same way; one log
line gives the result for each file. Requests are not interrupted. Without `--config` the other files are read again.

**Values.** Durations are a number of seconds, or text with a unit: `250ms`, `5s`, `2m`, `1h`. Sizes are a number of
bytes, or text with a unit: `64KiB`, `4MiB`, `1GiB`. Endpoints are `host:port`; an IPv6 address is in brackets.
Scalars are read as YAML 1.2 does: `no` and `on` are text, not booleans. Aliases work, merge keys (`<<`) and tags do
not.

**Editors.** A JSON Schema is in `extproc/config/schema.json`. With the YAML language server:

```yaml
# yaml-language-server: $schema=./extproc/config/schema.json
apiVersion: extproc/v1alpha1
kind: ExtprocConfig
server:
  tls: {mode: self-signed}
log:
  level: info
```

## Where endpoints come from

At most one of `pool.endpoints`, `pool.file` and `pool.dns`.

A static list. Addresses count at once; host names are resolved again every five seconds:

```yaml
pool:
  endpoints:
    - 10.0.0.7:8000
    - "[2001:db8::7]:8000"
    - gpu-3.example.com:8000
```

A file that something else writes; see "The endpoints file" below:

```yaml
pool:
  file: {path: /etc/extproc/endpoints.yaml}
```

DNS, for example a headless Service:

```yaml
pool:
  dns: {host: vllm.models.svc.cluster.local, port: 8000, interval: 5s}
```

or SRV records, which bring their ports:

```yaml
pool:
  dns: {host: _http._tcp.vllm.models.svc.cluster.local, type: SRV}
```

**When a look-up fails** (no answer, server failure) the endpoints found last stay, however long it takes: a DNS outage
must not become an outage of the models. The answer that a name has no addresses is accepted only the third time in a
row, because some servers give it for a moment during an update. Failures are logged when they begin and when
they end, and counted in `extproc_discovery_failures_total`. A host name with IPv4 and IPv6 addresses counts with its
IPv4 addresses only: two addresses of one server would look like two servers. A bad endpoints file is treated like a
failed look-up.

## Several pickers, TLS, and who may connect

A client of the gRPC port decides where requests go and what the prefix index contains. Across hosts use mutual TLS:

```yaml
server:
  tls:
    mode: files
    certificate: /etc/extproc/tls/tls.crt
    private_key: /etc/extproc/tls/tls.key
    client_ca: /etc/extproc/tls/ca.crt
```

A complete example, with some of the keys one changes most:

```yaml
apiVersion: extproc/v1alpha1
kind: ExtprocConfig
server:
  decision_deadline: 500ms
  max_inspect_bytes: 8MiB
  max_buffered_bytes: 1GiB
  drain_delay: 10s
  grace_period: 5m
pool:
  dns: {host: vllm.models.svc.cluster.local, port: 8000}
  engine: vllm
  scrape:
    headers: {authorization: Bearer 0123456789}
    busy_interval: 500ms
    timeout: 1s
routing:
  strategy: weighted
  weights: {prefix: 4, kv-cache: 1, queue: 2, in-flight: 5, session: 1}
  session_header: x-session-id
  limits: {queue: 64, kv_cache: 0.98}
explain: {header: true}
log:
  decisions: {sample: 0.1}
```
"""

AFTER: Final = """\
## The endpoints file

A list, or a mapping whose key `endpoints` holds one; each entry is `host:port` or a mapping. An empty list means no
endpoints; an empty file is refused, because it is probably being written.

```yaml
# endpoints file
endpoints:
  - 10.0.0.7:8000
  - {address: gpu-3.example.com, port: 8000, name: gpu-3, models: [llama-3.1-8b], labels: {zone: a}}
```
"""
