# The picker and nothing else: no test, demo or plotting library, no compiler, no pip in its environment, no shell needed, not root.
#   docker build -t extproc .
#   docker run --rm -p 9002:9002 -p 9090:9090 extproc serve --endpoint 10.0.0.7:8000
FROM python:3.11-slim AS build

WORKDIR /src
RUN python -m venv /opt/extproc
# Before the sources, so that a change of ours does not install everything anew.
COPY requirements/run.txt requirements/constraints.txt requirements/
RUN /opt/extproc/bin/pip install --no-cache-dir --disable-pip-version-check \
        -r requirements/run.txt -c requirements/constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY extproc extproc
RUN /opt/extproc/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps . \
    && /opt/extproc/bin/pip uninstall --yes --quiet setuptools pip

FROM python:3.11-slim

COPY --from=build /opt/extproc /opt/extproc
# Read-only root file systems are fine: nothing is written, bytecode was compiled above.
ENV PATH=/opt/extproc/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can check runAsNonRoot.
USER 65532:65532
# ext_proc and access log; gRPC health; /metrics, /healthz, /readyz. The admin pages (9091) stay on loopback.
EXPOSE 9002 9003 9090
ENTRYPOINT ["extproc"]
CMD ["serve"]
