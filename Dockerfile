# The three programs, for CPUs or, with --build-arg TORCH=cu130, for NVIDIA GPUs:
#
#   docker build --tag encode-once .
#   docker run --rm --volume "$PWD:/work" encode-once precompute build --config build.yaml
#
# TORCH is a backend as uv's option --torch-backend takes it.
ARG BASE=python:3.13-slim-bookworm
FROM ${BASE}

# With GPUs, torch.compile needs a C compiler at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user

ARG TORCH=cpu
# A layer of its own: torch is nearly all of the image, and changes less often than the rest.
# hadolint ignore=DL3013
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --constraint /constraints.txt --torch-backend "${TORCH}" torch

RUN --mount=type=bind,target=/source,rw \
    pip install --no-cache-dir --constraint /source/constraints.txt "/source[precompute,trainer,object-stores]"

USER 1000
WORKDIR /work
CMD ["precompute", "--help"]
