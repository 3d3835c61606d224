#!/usr/bin/env bash
# The sample is compiled, run and served with the lowest versions that pyproject.toml allows (constraints-lowest.txt).
#     tests/packaging/lowest.sh PYTHON DIR      DIR is made anew
set -euo pipefail
PYTHON=$1
WORK=$2
rm -rf "$WORK" && mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
"$PYTHON" -m venv "$WORK/venv"
"$WORK/venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints-lowest.txt \
    ${PIP_ARGS:-} '.[compile,serve]'
ICC=$WORK/venv/bin/icc
cp -r samples/pystd "$WORK/model"
cd "$WORK"
"$ICC" compile model -o cpu.engine --target cpu --quant awq4
"$ICC" compile model -o gpu.engine --target h100 --quant rtn4 --max-batch-size 2 --max-step-tokens 64
"$ICC" run cpu.engine -p 'def fib(n):' --max-tokens 16 --temperature 0 | tee answer.txt
test -s answer.txt
"$ICC" serve cpu.engine --port 0 >serve.txt 2>serve_errors.txt &
SERVER=$!
trap 'kill "$SERVER" 2>/dev/null || true' EXIT
for _ in $(seq 100); do grep -q http: serve.txt && break; sleep 0.2; done
URL=$(grep -o 'http:.*' serve.txt) || { cat serve_errors.txt >&2; exit 1; }
"$ICC" bench serve --url "$URL" --requests 4 --concurrency 2 --output-tokens 8
echo "lowest versions: compiled, run and served"
