#!/usr/bin/env bash
# Start both servers over MODEL_DIR, send BODY to each, and compare the answers.
#   MODEL_DIR=/data/ratings MODEL_NAME=ratings docker/smoke.sh '{"instances": [{"user_id": 1, "movie_id": 2}]}'
set -euo pipefail

body=${1:?give the JSON body of a predict request}
: "${MODEL_DIR:?set MODEL_DIR to the folder that holds the versions}"
name=${MODEL_NAME:-model}
compose=(docker compose --file "$(dirname "$0")/compose.yaml")

"${compose[@]}" up --build --detach
answers=$(mktemp --directory)
trap '"${compose[@]}" down; rm -r "$answers"' EXIT

# wait_for PORT: wait until the model of the server on PORT is AVAILABLE, at most two minutes.
wait_for() {
    for _ in $(seq 120); do
        if curl --silent --fail "http://127.0.0.1:$1/v1/models/$name" | grep --quiet AVAILABLE; then
            return
        fi
        sleep 1
    done
    echo "no model $name on port $1 after 120 s" >&2
    return 1
}

for port in 8501 8502; do
    wait_for "$port"
    curl --silent --show-error --data "$body" "http://127.0.0.1:$port/v1/models/$name:predict" | tee "$answers/$port"
    echo
done
cmp "$answers/8501" "$answers/8502" && echo "the same answer from both"
