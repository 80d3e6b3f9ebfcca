#!/bin/sh
# Writes .env from .env.example with a random key in each empty place that wants one. Keeps an .env that is there.
set -eu
cd "$(dirname "$0")/.."
if [ -e .env ]; then
    echo ".env is already there" >&2
    exit 1
fi
umask 077
while IFS= read -r line; do
    case "$line" in
        *_KEY= | *_KEYS= | *_PASSWORD=) printf '%s%s\n' "$line" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" ;;
        *) printf '%s\n' "$line" ;;
    esac
done < .env.example > .env
echo "wrote .env; your app's key is $(sed -n 's/^EDGE_API_KEYS=//p' .env)"
