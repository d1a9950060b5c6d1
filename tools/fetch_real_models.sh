#!/usr/bin/env bash
# Fills a folder with the pretrained models of tests/real_models: SmolLM2-135M-Instruct and Gemma 3 270M, in float32.
#
#   tools/fetch_real_models.sh FOLDER [FETCHER]
#
# FETCHER is a script with `download NAME DIR` (a GGUF file) and `convert FILE DIR`; by default the one beside the
# checkout. Without one, or where a model cannot be had, it says so and exits with 1.
set -uo pipefail
folder=$1
fetcher=${2:-../shared/tools/real_model.py}
python=.venv/bin/python

if [ ! -f "$fetcher" ]; then
  echo "no pretrained models: there is no $fetcher; set NRL_REAL_MODELS to a folder that holds some"
  exit 1
fi
mkdir -p "$folder"
# Only the conversion needs them.
site=$folder/.site
$python -m uv pip install --quiet --target "$site" --no-deps gguf accelerate || exit 1
for name in smollm2-135m gemma3-270m; do
  [ -f "$folder/$name/config.json" ] && continue
  scratch=$(mktemp -d -p "$folder")
  if $python "$fetcher" download "$name" "$scratch" &&
    PYTHONPATH=$site $python "$fetcher" convert "$scratch/$name.gguf" "$scratch/model" > "$scratch/log" 2>&1; then
    mv "$scratch/model" "$folder/$name"
    rm -rf "$scratch"
  else
    echo "no pretrained models: $name could not be had; see $scratch"
    exit 1
  fi
done
