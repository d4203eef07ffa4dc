# syntax=docker/dockerfile:1
# The bundled engine. From the repository's root, for CPUs and for NVIDIA GPUs:
#   docker build -f deploy/runner.Dockerfile -t warmlane-runner:0.1.0 .
#   docker build -f deploy/runner.Dockerfile -t warmlane-runner:0.1.0-cuda --build-arg DEVICE=cuda .
ARG DEVICE=cpu

FROM python:3.11.14-slim-bookworm AS requirements
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python -m venv /opt/warmlane \
 && python requirements.py runner > /tmp/requirements.txt \
 && grep '^torch==' /tmp/requirements.txt > /tmp/torch.txt

FROM requirements AS torch-cpu
RUN /opt/warmlane/bin/pip install --index-url https://download.pytorch.org/whl/cpu -r /tmp/torch.txt

# The usual index has the CUDA build, with CUDA's libraries and Triton; the host brings the driver.
FROM requirements AS torch-cuda
RUN /opt/warmlane/bin/pip install -r /tmp/torch.txt

# One of the two stages above, not an image.
# hadolint ignore=DL3006
FROM torch-${DEVICE} AS dependencies
RUN /opt/warmlane/bin/pip install --only-binary :all: -r /tmp/requirements.txt

FROM requirements AS wheel
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
# The CPU kernels are compiled on first start for the processor that is there, Triton's launchers
# likewise: both need a compiler.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++=4:12.2.0-3 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 warmlane \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent warmlane \
 && install -d -o 10001 -g 10001 /var/cache/warmlane /models
COPY --from=dependencies /opt/warmlane /opt/warmlane
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/warmlane/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
# All that is written outside of /tmp is compiled kernels: mount /var/cache/warmlane to keep them.
ENV PATH=/opt/warmlane/bin:$PATH PYTHONUNBUFFERED=1 \
    WARMLANE_MODELS_DIR=/models \
    XDG_CACHE_HOME=/var/cache/warmlane \
    TRITON_CACHE_DIR=/var/cache/warmlane/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /
# Requests, KV events and their replay.
EXPOSE 8000 5557 5558
# A large model loads for minutes; /health answers only then.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["warmlane"]
CMD ["runner", "--host", "0.0.0.0", "--port", "8000", "--kv-events", "tcp://0.0.0.0:5557", "--kv-replay", "tcp://0.0.0.0:5558"]
