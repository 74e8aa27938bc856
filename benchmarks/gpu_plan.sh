#!/usr/bin/env bash
# What the next lease of a GPU runs, in the order of importance (docs/recipe.md, "What is open"), for benchmarks/gpu_lease.py:
#
#     bash benchmarks/gpu_plan.sh DATA/amazon MINILM            # writes carry/: parts to send, and jobs.jsonl
#     bash benchmarks/gpu_plan.sh DATA/amazon MINILM MPNET      # some twenty parts
#
# Send the parts of carry/ one call each, jobs.jsonl with the first; then `start --most 8` and `collect` in the calls that follow.
# All calls at once: the machine goes back after 30 s without one.
set -euo pipefail
data=$1 minilm=$2 mpnet=${3:-}
python=${PYTHON:-.venv/bin/python}
lease=build/lease
# MiB of a part; with the tree 64 at most (its files in blocks of 4 KiB)
"$python" benchmarks/gpu_lease.py pack --model "$minilm" ${mpnet:+--model "$mpnet"} --data "$data" --part "${PART:-13}"
: > carry/jobs.jsonl

# Cells of protocol 5. FixMatch's runs are MTEM's too (src/mtem_paper/twins.py).
cells() {
  "$python" benchmarks/gpu_jobs.py --dataset amazon --data $lease/data --results $lease/results "$@" >> carry/jobs.jsonl
}
minilm() { cells --model "$minilm" --model-name minilm --memory 18 "$@"; }
mpnet() { if [ "$mpnet" ]; then cells --model "$mpnet" --model-name mpnet --memory 27 "$@"; fi; }

# Rehearsals on natural pools: do small pools want more passes? The rule is in docs/recipe.md, "What is open".
for target in books dvd electronics kitchen; do
  for domain in books dvd electronics kitchen; do
    [ "$target" = "$domain" ] && continue
    name=longer-$target-$domain rules=
    for passes in 12 30; do rules+=" --rule 'passes-$passes: method=mtem epochs=$passes balance_target=true view_radius=0.005'"; done
    "$python" - "$name" "python3 benchmarks/pilots/rehearsed_pools.py --data $lease/data --model $minilm --target $target --domain $domain \
--pool natural --epochs 12 --evaluations 6 --work $lease/work --out $lease/results/rehearsed/$name.jsonl$rules" >> carry/jobs.jsonl << 'END'
import json, sys
name, command = sys.argv[1:]
print(json.dumps({"name": name, "command": command, "memory": 10}))
END
  done
done

mpnet --settings unsupervised --pools mixed --variants mtem
minilm --settings unsupervised --pools mixed --variants cst,biat
minilm --settings unsupervised --pools natural --variants biat,out-without-pretraining,mtem-learned
minilm --settings unsupervised --pools mixed --seeds 0 --variants mtem-learned,mtem-without-perturbation,mtem-without-pretraining,mtem-without-average,mtem-without-view
minilm --settings semi-supervised --pools mixed --variants cst,biat,dann,mme,wind,oracle,mtem-learned,mtem-paper,out-without-pretraining
mpnet --settings unsupervised --pools mixed --variants mtem-learned,cst,biat,dann,oracle
minilm --settings unsupervised --pools mixed --seeds 0 --variants mtem-without-meta,mtem-without-annealing,mtem-without-sampling
sizes=$(for engine in layerwise taylor second-order; do printf "mtem-$engine-%d," 10 20 30 40 50 60; done)
minilm --settings unsupervised --pools mixed --targets kitchen --seeds 0 --variants "${sizes%,}"
wc -l carry/jobs.jsonl
