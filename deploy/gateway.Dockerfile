# syntax=docker/dockerfile:1
# The gateway and the warm-up command, without torch. From the repository's root:
#   docker build -f deploy/gateway.Dockerfile -t warmlane:0.1.0 .
FROM python:3.11.14-slim-bookworm AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python -m venv /opt/warmlane \
 && python requirements.py > /tmp/requirements.txt \
 && /opt/warmlane/bin/pip install --only-binary :all: -r /tmp/requirements.txt

FROM dependencies AS wheel
# With 1 the hot path is compiled (docs/sizing.md). The C compiler stays in this stage.
ARG WARMLANE_COMPILE=0
# Debian keeps one release of a package: whatever was pinned would be gone tomorrow.
# hadolint ignore=DL3008
RUN if [ "$WARMLANE_COMPILE" = 1 ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 warmlane \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent warmlane
# Dependencies change seldom and are one layer, the product is a second, small one.
COPY --from=dependencies /opt/warmlane /opt/warmlane
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/warmlane/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
ENV PATH=/opt/warmlane/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /
# Clients; operators where server.admin_port says so.
EXPOSE 8080 9090
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health/live', timeout=2)"]
ENTRYPOINT ["warmlane"]
CMD ["serve", "--config", "/etc/warmlane/config.yaml"]
