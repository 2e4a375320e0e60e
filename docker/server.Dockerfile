# tpuembed's command. Build from the repository's root, and give the arguments of `tpuembed`:
#   docker build --file docker/server.Dockerfile --tag tpuembed-server .
#   docker run --rm --publish 8501:8501 --volume "$PWD/models/ranker:/models/ranker:ro" tpuembed-server serve /models/ranker
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 1000 tpuembed
WORKDIR /opt/tpuembed
COPY pyproject.toml README.md LICENSE ./
COPY tpuembed tpuembed
COPY serving serving
COPY cli cli
# This folder is installed. It has its own version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve,cloud,redis]'

# With this label, SageMaker sets SAGEMAKER_BIND_TO_PORT.
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
USER 1000
# Listen on all addresses, so that ports can be reached from outside of the container.
ENV TPUEMBED_SERVE_HOST=0.0.0.0
# gRPC, REST, and REST on SageMaker and Vertex AI.
EXPOSE 8500 8501 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('TPUEMBED_SERVE_REST_PORT', '8501') + '/readyz', timeout=2)"]
# The server is the process that SIGTERM reaches. It answers for 5 more seconds, then has 30 to finish requests. Stop it with
# `docker stop --time 45`.
ENTRYPOINT ["tpuembed"]
# Serves the model that Vertex AI or SageMaker names. Elsewhere, give `serve MODEL_DIR`.
CMD ["serve"]
