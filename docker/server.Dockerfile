# tpuembed's own server over a model directory mounted at /models. Build from the repository's root:
#   docker build --file docker/server.Dockerfile --tag tpuembed-server .
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 1000 tpuembed
WORKDIR /opt/tpuembed
COPY pyproject.toml README.md LICENSE ./
COPY tpuembed tpuembed
COPY serving serving
COPY cli cli
# What is installed is this folder, which carries its own version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve]'

USER 1000
ENV MODEL_NAME=model
EXPOSE 8500 8501
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8501/readyz', timeout=2)"]
# exec: the server is the process that SIGTERM reaches. It answers for 5 seconds more and has 30 to finish requests: stop it with
# `docker stop --time 45`.
CMD ["sh", "-c", "exec tpuembed serve \"/models/${MODEL_NAME}\" --name \"${MODEL_NAME}\" --host 0.0.0.0 --rest-port 8501"]
