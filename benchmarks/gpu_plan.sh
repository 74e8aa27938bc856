#!/usr/bin/env bash
# What the next lease of a GPU runs, in the order of importance (docs/recipe.md, "What is open"), for benchmarks/gpu_lease.py:
#
#     bash benchmarks/gpu_plan.sh DATA/amazon MINILM            # writes carry/: parts to send, and jobs.jsonl
#     bash benchmarks/gpu_plan.sh DATA/amazon MPNET mpnet       # a lease of its own: six parts
#
# Send the parts of carry/ one call each, jobs.jsonl with the first; then `start --most 12` and `collect` in the calls that follow.
set -euo pipefail
data=$1 model=$2 name=${3:-minilm}
python=${PYTHON:-.venv/bin/python}
lease=build/lease
"$python" benchmarks/gpu_lease.py pack --model "$model" --data "$data" --part "${PART:-22}" # MiB; with the tree 64 at most
: > carry/jobs.jsonl

# Rehearsals on pools: terms of CST in MTEM on mixed pools; evened and shifted labels on natural ones.
rehearse() { # pool, name, rules
  local pool=$1 name=$2 rules="" rule target domain
  shift 2
  for rule in "$@"; do rules+=" --rule '$rule'"; done
  for target in books dvd electronics kitchen; do
    for domain in books dvd electronics kitchen; do
      [ "$target" = "$domain" ] && continue
      "$python" - "$name-$target-$domain" "python3 benchmarks/pilots/rehearsed_pools.py --data $lease/data --model MODEL --target $target \
--domain $domain --pool $pool $([ "$pool" = mixed ] && echo "--texts 2000 ")--epochs 8 --evaluations 4 --work $lease/work \
--out $lease/results/rehearsed/$name-$target-$domain.jsonl$rules" >> carry/jobs.jsonl << 'END'
import json, sys
name, command = sys.argv[1:]
# The pilots of a pair share a source model: the later ones wait for the first.
after = [] if name.startswith("terms") else [name.replace(name.split("-")[0], "terms", 1)]
print(json.dumps({"name": name, "command": command, "memory": 10, "after": after}))
END
    done
  done
}
plan_rehearsals() {
  local pilots=benchmarks/pilots natural="balance_target=true view_radius=0.005"
  rehearse mixed terms 'mtem: method=mtem view_radius=0.005' "reverse: method=$pilots/cycle.py reverse_weight=0.5 view_radius=0.005" \
    "both: method=$pilots/cycle.py tsallis_weight=0.08 reverse_weight=0.5 view_radius=0.005" \
    'cst: method=cst view_radius=0.005'
  rehearse natural evened "balanced: method=mtem $natural" "shifted: method=$pilots/shifted.py learned=true labels=false $natural" \
    "evened: method=$pilots/evened.py $natural" "half: method=$pilots/evened.py power=0.5 $natural" \
    "reverse: method=$pilots/cycle.py reverse_weight=0.5 $natural"
}

# Cells of protocol 5. FixMatch's runs are MTEM's too (src/mtem_paper/twins.py), whatever becomes part of MTEM later.
cells() {
  "$python" benchmarks/gpu_jobs.py --dataset amazon --model "$model" --model-name "$name" --data $lease/data \
    --results $lease/results --settings unsupervised "$@" >> carry/jobs.jsonl
}
if [ "$name" = mpnet ]; then
  cells --pools mixed --variants mtem --memory 27
else
  plan_rehearsals
  cells --pools mixed --variants fixmatch --seeds 1,2,3,4 --memory 18 # MTEM has two of them
  cells --pools mixed --variants cst,biat,dann,mme,oracle,mtem-paper --seeds 0 --memory 18
fi
wc -l carry/jobs.jsonl
