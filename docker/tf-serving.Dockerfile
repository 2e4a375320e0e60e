# TensorFlow Serving over the same model directory, with the threads that suit lookups on few cores.
#   docker build --file docker/tf-serving.Dockerfile --tag tpuembed-tf-serving docker
FROM tensorflow/serving:2.19.1

ENV MODEL_NAME=model
EXPOSE 8500 8501
# The base image's entrypoint reads MODEL_NAME and MODEL_BASE_PATH (/models), and appends these options.
CMD ["--rest_api_timeout_in_ms=30000", "--enable_model_warmup=true", "--file_system_poll_wait_seconds=1"]
