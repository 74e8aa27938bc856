#!/usr/bin/env bash
# What the next lease of a GPU runs, in the order of importance (docs/recipe.md, "What is open"), for benchmarks/gpu_lease.py:
#
#     bash benchmarks/gpu_plan.sh DATA/amazon MINILM            # writes carry/: parts to send, and jobs.jsonl
#     bash benchmarks/gpu_plan.sh DATA/amazon MPNET mpnet       # a lease of its own: some fifteen parts
#
# Send the parts of carry/ one call each, jobs.jsonl with the first; then `start --most 6` and `collect` in the calls that follow.
# All calls at once: the machine goes back after 30 s without one.
set -euo pipefail
data=$1 model=$2 name=${3:-minilm}
python=${PYTHON:-.venv/bin/python}
lease=build/lease
"$python" benchmarks/gpu_lease.py pack --model "$model" --data "$data" --part "${PART:-13}" # MiB; with the tree 64 at most (its files in blocks of 4 KiB)
: > carry/jobs.jsonl

# Cells of protocol 5. FixMatch's runs are MTEM's too (src/mtem_paper/twins.py).
cells() {
  "$python" benchmarks/gpu_jobs.py --dataset amazon --model "$model" --model-name "$name" --data $lease/data \
    --results $lease/results "$@" >> carry/jobs.jsonl
}
if [ "$name" = mpnet ]; then
  cells --settings unsupervised --pools mixed --variants mtem --memory 27
else
  cells --settings unsupervised --pools mixed --variants fixmatch --seeds 4 --memory 18
  cells --settings unsupervised --pools natural --variants fixmatch --memory 18
  cells --settings unsupervised --pools mixed --variants cst,biat,dann,mme,oracle,mtem-paper --seeds 0 --memory 18
  cells --settings semi-supervised --pools mixed --variants fixmatch --memory 18
fi
wc -l carry/jobs.jsonl
