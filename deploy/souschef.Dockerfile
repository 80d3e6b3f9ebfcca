# Edge agent and cloud service are one package; the targets `edge` and `cloud` differ in what they start.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# For a mirror, or a folder of wheels that PYTHON_IMAGE brings. Left out, pip asks where it always asks.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
WORKDIR /src
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
RUN python3 -m venv /opt/souschef \
    && /opt/souschef/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY edge_agent edge_agent
COPY cloud_service cloud_service
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/souschef/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl

FROM ${PYTHON_IMAGE} AS runtime
COPY --from=build /opt/souschef /opt/souschef
COPY deploy/healthcheck.sh /opt/souschef/healthcheck.sh
# The owner that a new volume takes over.
RUN mkdir /models && chown 10001:10001 /models
ENV PATH=/opt/souschef/bin:$PATH \
    HOME=/tmp \
    SOUSCHEF_CACHE_DIR=/models \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp

FROM runtime AS edge
EXPOSE 8080
ENTRYPOINT ["edge-agent"]
CMD ["serve"]

FROM runtime AS cloud
EXPOSE 8090
ENTRYPOINT ["cloud-service"]
CMD ["serve"]
